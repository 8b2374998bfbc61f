"""The command line: what it writes, and its one-line errors."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from command_help import assert_light
from head_models import feature_head, shaken
from model_families import FAMILIES, build
from model_folders import pieces, save_model, save_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel

from specdec_loop.cli import arguments, main
from specdec_loop.cli.generate import Writer
from specdec_loop.cli.measure import Case, Comparison, Policy, Round, all_cases, distinct
from specdec_loop.draft_length import FixedLength
from specdec_loop.heads import MtpLayer, Shared, save_head
from specdec_loop.heads.mtp_layers import DEEPSEEK
from specdec_loop.methods import LOADERS, METHODS

ROOT = Path(__file__).resolve().parents[2]
BINARY = str(ROOT / "docs/pictures/step.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_model(made / "target")
    save_model(made / "draft", layers=1, seed=1)
    return made


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def call(folder: Path, command: str, *arguments: str) -> int:
    """Run a command with the tiny models, unless it names others."""
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--heads", str(folder)]
    machine = ["--datastore", str(folder / "store.pt"), "--device", "cpu", "--threads", "1"]
    return main([command, *models, *machine, *arguments])


def plain_text(folder: Path, prompt: str, tokens: int) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "target")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return str(tokenizer.decode(out[0], skip_special_tokens=False))


@pytest.mark.parametrize("length", [[], ["--draft-length", "2"], ["--draft-length", "auto"]])
@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "draft-model-ratio"])
def test_generate_writes_the_text_of_plain_decoding(
    folder: Path, capsys: pytest.CaptureFixture[str], method: str, length: list[str]
) -> None:
    assert call(folder, "generate", "def f(a, a):", "--method", method, "--max-new-tokens", "20", *length) == 0
    out, err = capsys.readouterr()
    assert out == plain_text(folder, "def f(a, a):", 20) + "\n"
    assert "20 tokens in" in err or "a step" in err


def test_prompts_come_from_files_and_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("import os")
    options = ["--method", "plain", "--max-new-tokens", "5"]
    assert call(folder, "generate", "--file", str(tmp_path / "prompt.txt"), *options) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("import os"))
    assert call(folder, "generate", *options) == 0
    assert capsys.readouterr().out == from_file
    assert from_file.startswith("import os")


def test_a_text_obeys_its_grammar(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    (tmp_path / "schema.json").write_text('{"enum": [["a", 1]]}')
    (tmp_path / "grammar.lark").write_text('start: "x" | "y"')
    for option, value, pattern in (
        ("--json-schema", str(tmp_path / "schema.json"), re.escape('["a", 1]')),
        ("--regex", "[b-d]{5}", "[b-d]{5}"),
        ("--grammar", str(tmp_path / "grammar.lark"), "[xy]"),
    ):
        assert call(folder, "generate", "# ", "--temperature", "1", option, value) == 0
        assert re.fullmatch(rf"# {pattern}<\|end\|>\n", capsys.readouterr().out)
    for option, value in (("--regex", "("), ("--json-schema", "nowhere.json")):
        assert call(folder, "generate", "# ", option, value) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_accepted_tokens_are_green(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "30", "--color", "always", "--draft", str(folder / "target")]
    assert call(folder, "generate", "abc", *options) == 0
    colored = capsys.readouterr().out
    assert colored.count("\x1b[32m") > 3
    assert call(folder, "generate", "abc", "--method", "plain", "--max-new-tokens", "30", "--color", "never") == 0
    assert "\x1b[" not in capsys.readouterr().out
    assert colored.count("\x1b[32m") == colored.count("\x1b[0m")


def test_a_line_keeps_its_leading_space_and_end_tokens_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer of sentence pieces drops a space in front of what it decodes."""
    pieces = Tokenizer(WordLevel({"</s>": 0, "\n": 1, "▁a": 2, "b": 3, "▁c": 4}, unk_token="</s>"))
    pieces.decoder = Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>")
    writer = Writer(tokenizer, [3], in_color=False)
    writer.take(0, [2, 3, 1, 4, 3, 2, 0], 0)
    writer.finish()
    assert capsys.readouterr().out == " ab\n cb a</s>"


def test_bytes_that_make_no_character_are_shown_when_the_text_ends(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = pieces("▁a")
    a, *half = tokenizer.convert_tokens_to_ids(["▁a", "<0xF0>", "<0x9F>"])
    writer = Writer(tokenizer, [a], in_color=False)
    writer.take(0, [a, *half], 0)
    assert capsys.readouterr().out == " a"
    writer.finish()
    assert capsys.readouterr().out == "\ufffd\ufffd"


def test_compare_writes_tables_json_and_chart(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x = y; x = y; x =")
    (tmp_path / "b.txt").write_text("for i in range(3):")
    files = ["--prompts", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    outputs = ["--json", str(tmp_path / "c.json"), "--png", str(tmp_path / "c.png")]
    methods = ["--methods", "plain", "prompt-lookup", "draft-model-ratio", "--draft-dtype", "bfloat16"]
    small = ["--rounds", "2", "--max-new-tokens", "12", "--batch", "1", "2", "--temperature", "0", "0.8"]
    assert call(folder, "compare", *files, *outputs, *methods, *small, "--rivals") == 0
    shown = capsys.readouterr().out
    assert "greedy, batch 1" in shown and "temperature 0.8, batch 2" in shown
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["machine"]["torch"] == torch.__version__
    rows = {(r["method"], r["temperature"], r["batch"]): r for r in written["rows"]}
    assert len(rows) == 3 * 2 * 2 + 2 * 2  # without an assistant: its method is not among them
    for (method, temperature, batch), row in rows.items():
        assert row["tokens_per_second"] > 0 and 0 < row["distinct"] <= 1
        if method == "plain":
            assert row["speedup"] == 1.0 and row["tokens_per_step"] == 1.0
        if method == "prompt-lookup":
            assert row["same_text"] == "2/2", (temperature, batch)
        if row["acceptance"] is not None:
            assert sum(row["acceptance_by_child"]) == pytest.approx(row["acceptance"])
            assert row["verified_per_step"] == pytest.approx(1 + sum(row["drafted_at_least"]))
            first = row["accepted_at_least"][0] if row["accepted_at_least"] else 0.0
            assert first == pytest.approx(row["drafted_at_least"][0] * row["acceptance_by_position"][0])
        if method == "draft-model-ratio":
            assert row["same_text"] == ("2/2" if temperature == 0 else None)
            assert (row["predicted_tokens_per_second"] is None) == (row["acceptance"] is None)  # drafts may not pay
        if row["predicted_tokens_per_second"] is not None:
            assert row["predicted_tokens_per_second"] > 0
    assert (tmp_path / "c.png").read_bytes()[1:4] == b"PNG"


def test_a_method_is_held_against_plain_decoding_just_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that gets slower by as much with every run."""
    runs = []

    def slower(self: Comparison, case: Case, policy: Policy, start: int, new_tokens: int, done: Round) -> float:
        runs.append(case.method)
        done.texts.append([7] * new_tokens)
        done.seconds += len(runs)
        return len(runs)

    monkeypatch.setattr(Comparison, "_run", slower)
    models: Any = SimpleNamespace(drafter=lambda method: None, draft_length=lambda method, batch: FixedLength(1))
    names = [name for name in METHODS if name != "plain"][:5]
    comparison = Comparison(models, [[1], [2]], all_cases([names[0], "plain", *names[1:]], [1.0], [1], []), 10)
    runs.clear()
    assert len(list(comparison.rounds(2))) == comparison.steps(2)
    turn = ["plain", *names[:4], "plain", names[4], "plain"]
    assert runs == turn * 4  # two rounds of two prompts
    speedups = {row.method: row.speedup for row in comparison.rows()}
    assert speedups["plain"] == speedups[names[4]] == 1.0  # it ran just between two of plain decoding
    rounds = [(3.5 + 11.5) / (2 + 10), (19.5 + 27.5) / (18 + 26)]  # plain decoding's mean times; and its own
    assert speedups[names[0]] == pytest.approx(sum(rounds) / 2)


def test_the_datastore_is_built_and_used(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(folder, "generate", "abc", "--method", "rest") == 2
    assert "no datastore at" in capsys.readouterr().err
    (tmp_path / "one.py").write_text("abc abc abd")
    tokenizer = ["--tokenizer", str(folder / "target"), "--out", str(folder / "store.pt")]
    for words in ([str(tmp_path), *tokenizer], [*tokenizer, str(tmp_path)]):  # options before or behind the files
        (folder / "store.pt").unlink(missing_ok=True)
        assert main(["datastore", "build", *words]) == 0
        assert "12 tokens of 1 files" in capsys.readouterr().out
    assert main(["datastore", "build", "--depth", "5"]) == 2
    assert "--depth: must be a power of two, got '5'" in capsys.readouterr().err
    assert call(folder, "generate", "abc", "--method", "rest", "--max-new-tokens", "5") == 0


def test_every_method_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--target", "nowhere"], "--target: no config.json in nowhere: give the folder of a"),
        (["generate", "x", "--draft", "nowhere"], "method draft-model: --draft: no config.json in nowhere"),
        (
            ["generate", "x", "--method", "eagle"],
            "give --head eagle=FOLDER, or its name on the Hugging Face Hub",
        ),
        (
            ["generate", "x", "--method", "eagle", "--head", "eagle=no"],
            "method eagle: --head eagle: no config.json in no:",
        ),
        (
            ["generate", "x", "--head", "nonsense=x"],
            "--head: must be KIND=FOLDER, KIND one of medusa, eagle, eagle3, peagle",
        ),
        (["generate", "x", "--method", "mtp-layers"], "model.safetensors: no layer for multi-token prediction here"),
        (["generate", "", "--method", "plain"], "the prompt is empty"),
        (["generate", "x" * 300], "the prompt has 300 tokens and --max-new-tokens is 128, but the model has 256"),
        (["generate", "x", "--stop", ""], "--stop: must be a text of at least one character, got ''"),
        (["generate", "x", "--file", "y"], "a prompt and --file are given: leave out one"),
        (["generate", "--file", "y"], "--file: there is no file y"),
        (
            ["generate", "x", "--draft-length", "-1"],
            "--draft-length: must be a whole number of at least 1, got '-1'; or",
        ),
        (
            ["generate", "x", "--method", "magic"],
            "--method: no method is called magic; methods are, with blanks between them, plain prompt-lookup",
        ),
        (["generate", "x", "--temperature", "-1"], "--temperature: must be a number of at least 0, got '-1'"),
        (["generate", "x", "--temperature", "nan"], "--temperature: must be a number of at least 0, got 'nan'"),
        (["generate", "x", "--temperature", "inf"], "--temperature: must be a number of at least 0, got 'inf'"),
        (["generate", "x", "--top-p", "5"], "--top-p: must be a number in (0, 1], got '5'"),
        (["generate", "x", "--top-p", "0"], "--top-p: must be a number in (0, 1], got '0'"),
        (["generate", "x", "--min-p", "-0.1"], "--min-p: must be a number in [0, 1], got '-0.1'"),
        (["generate", "x", "--top-k", "1.5"], "--top-k: must be a whole number in [0, 2147483647], got '1.5'"),
        (["generate", "x", "--seed", str(2**63)], f"--seed: must be a whole number in [-{2**63}, {2**63 - 1}], got"),
        (["generate", "--file", BINARY], f"--file: {BINARY} is no text in UTF-8: byte 0 is wrong"),
        (["generate", "x", "--grammar", BINARY], f"--grammar: {BINARY} is no text in UTF-8"),
        (["compare", "--prompts", BINARY], f"--prompts: {BINARY} is no text in UTF-8"),
        (
            ["generate", "x", "--method", "rest", "--datastore", BINARY],
            f"method rest: Datastore: {BINARY} must be a file that Datastore.save wrote",
        ),
        (["generate", "x", "--threads", "0"], "--threads: must be a whole number of at least 1, got '0'"),
        (["generate", "x", "--device", "tpu"], "--device: must be cpu, cuda or cuda:N, got tpu"),
        (["generate", "x", "--device", "cuda:99"], "CUDA devices here, got cuda:99: give cpu"),
        (["generate", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["compare", "--methods", "magic"], "no method is called magic"),
        (["compare", "--prompts", "y"], "--prompts: there is no file y"),
        (["compare", "--json", f"{BINARY}/x.json"], f"--json: {BINARY}/x.json cannot be written: "),
        (["compare", "--png", str(ROOT)], f"--png: {ROOT} cannot be written: Is a directory"),
        (["demo", "--folder", BINARY], f"--folder: {BINARY}/demo.json cannot be written: "),
        (["compare", "--count", "0"], "--count: must be a whole number of at least 1, got '0'"),
        (["compare", "--count", "2", "--batch", "4"], "--batch: 4 must divide the number of prompts, which is 2"),
        (["compare", "--count", "6", "--batch", "2", "4"], "--batch: 4 must divide the number of prompts, which is 6"),
    ],
)
def test_mistakes_are_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert call(folder, *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_heads_are_those_that_the_command_names(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-EAGLE's in a folder and on the Hub, the target's own layer; a head of another target is refused."""
    target = transformers.AutoModelForCausalLM.from_pretrained(folder / "target")
    head = feature_head("peagle", target)
    save_head(head, tmp_path / "head", head.config.to_dict())
    layer = shaken(MtpLayer(target, Shared(target)))
    shutil.copytree(folder / "target", tmp_path / "target")
    names = {ours: theirs for theirs, ours in DEEPSEEK.items()}
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        first, rest = name.split(".", 1)
        tensors[f"model.layers.2.{'' if first == 'block' else names[first + '.']}{rest}"] = tensor
    save_file(tensors, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    want = plain_text(folder, "def f(a, a):", 20)

    def text(*words: str) -> str:
        assert call(folder, "generate", "def f(a, a):", "--max-new-tokens", "20", "--method", *words) == 0
        out, err = capsys.readouterr()
        assert "tokens in" in err
        return out.rstrip("\n")

    assert want.startswith(text("peagle", "--head", f"peagle={tmp_path / 'head'}"))
    assert want.startswith(text("mtp-layers", "--head", f"mtp-layers={tmp_path / 'target'}"))
    assert want.startswith(text("mtp-layers", "--target", str(tmp_path / "target")))
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "a file")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: (asked.append(name), str(tmp_path / "head"))[1]
    )
    assert want.startswith(text("peagle", "--head", "peagle=some-owner/head"))
    assert asked == ["some-owner/head"]
    assert call(folder, "generate", "x", "--method", "eagle3", "--head", f"eagle3={tmp_path / 'head'}") == 2
    assert "not expected: ['mask_hidden']" in capsys.readouterr().err


def test_the_kinds_of_heads_are_those_that_are_loaded() -> None:
    assert tuple(LOADERS) == arguments.HEADS


def test_a_model_on_the_hub_is_asked_for_and_an_unreachable_hub_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert call(folder, "generate", "x", "--target", "some-owner/no-such-model") == 2
    err = capsys.readouterr().err
    assert "--target: some-owner/no-such-model is neither a folder nor in the local cache, and the Hugging" in err
    assert err.count("\n") == 1
    asked: list[str] = []

    def load(name: str, **options: Any) -> None:
        asked.append(name)
        raise OSError("the Hub was asked")

    monkeypatch.setattr("specdec_loop.cli.loading.urllib.request.urlopen", lambda *_, **__: io.BytesIO())
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", load)
    assert call(folder, "generate", "x", "--target", "some-owner/no-such-model") == 2
    assert asked == ["some-owner/no-such-model"] and "the Hub was asked" in capsys.readouterr().err


def test_default_models_are_those_of_the_clone_or_of_the_clone_around_the_working_directory(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arguments.default_model("--target", "target") == ROOT / "python/models/target"
    # As in site-packages: no models lie beside the package.
    monkeypatch.setattr(arguments, "__file__", str(tmp_path / "site-packages/specdec_loop/cli/arguments.py"))
    monkeypatch.chdir(ROOT / "docs")
    assert arguments.default_model("--target", "target") == ROOT / "python/models/target"
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "x", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "--target is not given, and the default models are in the repository only (python/models)" in err
    assert err.count("\n") == 1
    assert main(["generate", "x", "--device", "cpu", "--target", str(folder / "target")]) == 2
    assert "method draft-model: --draft is not given" in capsys.readouterr().err


def test_a_reader_that_is_gone_is_no_error() -> None:
    command = [sys.executable, "-m", "specdec_loop", "compare", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_package_that_is_missing_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "specdec_loop.cli.generate", raising=False)
    monkeypatch.delitem(sys.modules, "specdec_loop.cli.loading", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert call(folder, "generate", "x") == 2
    said = "specdec_loop: huggingface_hub is not installed: pip install huggingface_hub\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", [[], ["generate"], ["compare"], ["demo"], ["datastore"], ["datastore", "build"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    assert_light("specdec_loop.cli", words)


def test_progress_is_written_to_standard_error_where_it_is_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x = y; x = y; x =")
    small = ["--prompts", str(tmp_path / "a.txt"), "--rounds", "2", "--max-new-tokens", "4", "--temperature", "0"]
    assert call(folder, "compare", *small, "--methods", "plain") == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "warming up",
        "1/2 plain, temperature 0, batch 1",
        "2/2 plain, temperature 0, batch 1",
    ]
    assert "warming up" not in out and "greedy, batch 1" in out


def test_a_tokenizer_that_does_not_match_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_model(tmp_path / "other", layers=1)
    save_tokenizer(tmp_path / "other", first="<|stop|>")
    assert call(folder, "generate", "x", "--draft", str(tmp_path / "other")) == 2
    assert "has another vocabulary than --target" in capsys.readouterr().err
    save_model(tmp_path / "small", vocab=100)
    assert call(folder, "generate", "x", "--target", str(tmp_path / "small")) == 2
    assert "has 257 tokens, the model only 100" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["draft-model", "draft-model-ratio", "independent"])
@pytest.mark.parametrize("vocab", [257 + 7, 257 - 16])
def test_a_draft_model_may_have_other_padding_behind_the_same_tokens(
    method: str, vocab: int, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As Qwen 2.5's: 151,936 rows of the small models, 152,064 of the large ones, and one tokenizer."""
    save_model(tmp_path, layers=1, vocab=vocab, seed=1)
    options = ["--method", method, "--max-new-tokens", "20"]
    assert call(folder, "generate", "def f(a, a):", "--draft", str(tmp_path), *options) == 0
    out = capsys.readouterr().out
    assert plain_text(folder, "def f(a, a):", 20).startswith(out.rstrip("\n"))


@pytest.mark.parametrize("family", ["Mamba", "Gemma 3, images"])
def test_a_configuration_may_have_no_vocabulary_or_positions_of_its_own(
    family: str, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kind, special = FAMILIES[family]
    text = {**special.get("text_config", {}), "vocab_size": 257}
    network = build(kind, {**special, **({"text_config": text} if "text_config" in special else text)})
    assert not all(hasattr(network.config, name) for name in ("vocab_size", "max_position_embeddings"))
    network.generation_config.eos_token_id = 0
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    options = ["--target", str(tmp_path), "--draft", str(tmp_path), "--max-new-tokens", "4"]
    assert call(folder, "generate", "x", *options, "--method", "draft-model") == 0
    assert capsys.readouterr().out.startswith("x")
    if find_spec("llguidance") is not None:
        assert call(folder, "generate", "x", *options, "--regex", "[a-z]{3}") == 0
        assert re.fullmatch("x[a-z]{3}.*", capsys.readouterr().out.strip())


@pytest.mark.parametrize(("family", "reason"), [("RWKV", "its state is recurrent"), ("BLOOM", "no position_ids")])
def test_a_model_that_is_not_served_is_named_with_the_reason(
    family: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    network = build(*FAMILIES[family])
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert call(folder, "generate", "x", "--target", str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"TreeCache: {type(network).__name__} is not served: " in line and reason in line


def test_a_model_keeps_the_attention_that_transformers_chooses(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """GPT-J has no SDPA, and SDPA would leave out Gemma 2's softcap."""
    name, special = FAMILIES["GPT-J"]
    build(name, {**special, "vocab_size": 257}).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert call(folder, "generate", "x", "--target", str(tmp_path), "--method", "plain", "--max-new-tokens", "4") == 0


def test_no_memory_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("specdec_loop.cli.generate.decode", full)
    assert call(folder, "generate", "x") == 2
    assert "out of memory: give a smaller" in capsys.readouterr().err


def test_cases_are_all_combinations_and_rivals_run_alone() -> None:
    cases = all_cases(["plain", "rest"], [0.0, 1.0], [1, 8], ["transformers plain"])
    assert len(cases) == len(set(cases)) == 10
    assert {case.batch for case in cases if case.method == "transformers plain"} == {1}
    assert all_cases(["plain"], [0.0], [8], ["transformers plain"]) == [Case("plain", 0.0, 8)]


def test_distinct_counts_ngrams() -> None:
    assert distinct([[1, 2, 3, 4, 5, 6]]) == 1.0
    assert distinct([[1, 1, 1, 1, 1, 1, 1]]) == 0.25
    assert distinct([[1, 2]]) == 1.0
