"""tree_attention: against float64 under a mask made by Python loops, and no worse than SDPA, in poisoned memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import FORMATS, NAN, assert_bits, compare, exact, make
from optional_hypothesis import HealthCheck, given, settings, st

from specdec_kernels import TreeAttention, tree_attention, tree_layout
from specdec_kernels.ops.tree_attention import op

FLOAT8 = torch.zeros(2, 2, 9, 8).to(torch.float8_e4m3fn)

# --- examples one can check by hand


def test_a_root_and_two_children_average_what_they_see(backend: str, device: str) -> None:
    ancestors = tree_layout(torch.tensor([[-1, 0, 0]]), max_depth=1).ancestors.to(device)
    query, key = torch.zeros(1, 3, 1, 2, device=device), torch.zeros(1, 1, 5, 2, device=device)
    value = torch.tensor([3.0, 5.0, 7.0, 9.0, -1.0], device=device).view(1, 1, 5, 1)
    found = tree_attention(query, key, value, ancestors, torch.tensor([2], device=device))
    assert found.output.flatten().tolist() == pytest.approx([5.0, 6.0, 3.5])
    assert found.logsumexp.flatten().exp().tolist() == pytest.approx([3.0, 4.0, 4.0])


def test_a_chain_is_causal_attention(backend: str, device: str) -> None:
    case = make(lengths=(0,), nodes=12, ragged=False, device=device)
    case.parents = torch.arange(-1, 11, device=device)[None]
    case.key, case.value = (r.float().transpose(1, 2).contiguous().to(device) for r in (case.keys, case.values))
    keys, values = (t.repeat_interleave(2, 1) for t in (case.key, case.value))
    want = torch.nn.functional.scaled_dot_product_attention(case.query.transpose(1, 2), keys, values, is_causal=True)
    torch.testing.assert_close(case.run().output, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


# --- every shape that it takes


def is_compiled(backend: str, device: str) -> bool:
    """Triton's own limits hold there."""
    return backend == "triton" and device == "cuda"


def dtypes_of(backend: str, device: str, dims: tuple[int, int]) -> list[torch.dtype]:
    return [torch.bfloat16] if max(dims) > 256 and is_compiled(backend, device) else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("window", [0, 1, 4, 20, 10**6])  # off; itself alone; inside the tree; cuts the cache; all
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("nodes", [4, 20])  # the cpu backend takes up to 28 rows of a key head another way
def test_formats_windows_and_ragged_lengths(backend: str, device: str, nodes: int, format: str, window: int) -> None:
    compare(make(format, nodes=nodes, window=window, device=device, seed=window % 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (3, 3), (7, 1)], ids=str)  # multi-query, grouped, none, an odd group
def test_heads_and_dtypes(backend: str, device: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for nodes in (1, 9, 30):
        compare(make("nhd", nodes=nodes, heads=heads, dtype=dtype, dims=(64, 64), device=device))


# A power of two; not one; the largest; values that differ from keys, as of latent attention; not a multiple of 4.
@pytest.mark.parametrize(
    "dims", [(32, 32), (80, 80), (128, 128), (192, 128), (256, 256), (288, 96), (33, 1), (5, 70)], ids=str
)
def test_dims(backend: str, device: str, dims: tuple[int, int]) -> None:
    for dtype in dtypes_of(backend, device, dims):
        for nodes in (2, 20):
            compare(make(dims=dims, nodes=nodes, dtype=dtype, lengths=(70, 3), device=device))


@pytest.mark.parametrize("dims", [(576, 512), (40, 32), (50, 33), (24, 24)], ids=str)
@pytest.mark.parametrize("format", ["bhld", "nhd"])
def test_values_that_are_the_first_columns_of_keys(
    backend: str, device: str, format: str, dims: tuple[int, int]
) -> None:
    for dtype, nodes in itertools.product(dtypes_of(backend, device, dims), (1, 9)):
        case = make(
            format, dims=dims, nodes=nodes, heads=(6, 1), dtype=dtype, lengths=(70, 3), is_latent=True, device=device
        )  # fmt: skip
        assert case.key.data_ptr() == case.value.data_ptr()
        compare(case)
        apart = case.run(value=case.value.clone())
        torch.testing.assert_close(apart.output, case.run().output)


@pytest.mark.parametrize("float8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_caches_of_8_bits(backend: str, device: str, dtype: torch.dtype, float8: torch.dtype) -> None:
    if dtype == torch.float32 and is_compiled(backend, device):
        pytest.skip("refused")
    for format, dims, is_latent in (("hnd", (64, 64), False), ("nhd", (33, 5), False), ("nhd", (40, 32), True)):
        for nodes in (1, 20):
            case = make(
                format, dims=dims, nodes=nodes, heads=(6, 1) if is_latent else (6, 3), dtype=dtype, float8=float8,
                is_latent=is_latent, device=device,
            )  # fmt: skip
            compare(case)


@pytest.mark.parametrize("float8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_8_bit_number_is_read_exactly(backend: str, device: str, float8: torch.dtype) -> None:
    """Each as the only value that a root attends; NaN and infinity too."""
    numbers = torch.arange(256, dtype=torch.uint8).view(float8)
    value = numbers.view(256, 1, 1, 1).to(device)
    ancestors = torch.ones(256, 1, 1, dtype=torch.int32, device=device)
    lengths = torch.zeros(256, dtype=torch.int64, device=device)
    query = torch.zeros(
        256, 1, 1, 1, device=device, dtype=torch.float16 if float8 == torch.float8_e5m2 else torch.bfloat16
    )
    key = torch.zeros_like(query).to(float8)
    found = tree_attention(query, key, value, ancestors, lengths)
    torch.testing.assert_close(found.output.flatten().float().cpu(), numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("float8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_ptx_widens_every_byte_at_every_place(dtype: torch.dtype, float8: torch.dtype) -> None:
    """By running it here: only the simulated and real GPUs do."""
    from specdec_kernels.ops.tree_attention.triton_kernel import FLOAT8, widening_ptx

    size = 256.0 if float8 == torch.float8_e4m3fn else 1.0
    for byte in range(256):
        four = [byte, 255 - byte, (byte * 7 + 1) % 256, byte ^ 0x80]
        pairs = run_ptx(widening_ptx(FLOAT8[float8], dtype), sum(b << 8 * i for i, b in enumerate(four)))
        found = torch.tensor([half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]).to(torch.uint16)
        want = torch.tensor(four, dtype=torch.uint8).view(float8).float() / size
        torch.testing.assert_close(found.view(dtype).float(), want, rtol=0, atol=0, equal_nan=True)
        assert ((found.view(dtype).signbit() == want.signbit()) | want.isnan()).all(), four  # of zeros too


def fused(*words: int) -> int:
    """x * y + z of two bfloat16 each."""
    x, y, z = torch.tensor([[w & 0xFFFF, w >> 16] for w in words]).to(torch.uint16).view(torch.bfloat16).float()
    low, high = (x * y + z).bfloat16().view(torch.uint16).tolist()
    return int(low | high << 16)


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda x: x, "shr.u32": int.__rshift__, "and.b32": int.__and__, "or.b32": int.__or__,
    "add.u32": int.__add__, "mad.lo.u32": lambda x, y, z: x * y + z, "fma.rn.bf16x2": fused,
}  # fmt: skip


def run_ptx(text: str, word: int) -> list[int]:
    """What instructions in braces make of a register, as two registers."""
    values = {"$2": word}

    def read(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0)

    for line in text.strip("{} ").split(";"):
        opcode, _, operands = line.strip().partition(" ")
        if opcode in ("", ".reg"):
            continue
        target, *names = (name.strip() for name in operands.split(","))
        x, *rest = map(read, names)
        if opcode == "prmt.b32":
            all_bytes = x | rest[0] << 32
            picked = [all_bytes >> 8 * (rest[1] >> 4 * i & 7) & 255 for i in range(4)]
            values[target] = sum(b << 8 * i for i, b in enumerate(picked))
        else:
            values[target] = OPERATIONS[opcode](x, *rest) & 0xFFFFFFFF
    return [values["$0"], values["$1"]]


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 64, 65, 257, 1024])  # the edges of words and tiles
def test_nodes(backend: str, device: str, is_slow: bool, nodes: int) -> None:
    compare(
        make(nodes=nodes, lengths=(40,) if is_slow else (100, 3, 0), heads=(2, 1), device=device, ragged=nodes < 99)
    )


@pytest.mark.parametrize("length", [63, 64, 65, 255, 256, 257, 1023, 1025, 5000])  # the edges of tiles and splits
def test_long_caches(backend: str, device: str, is_slow: bool, length: int) -> None:
    if is_slow and length > 1100:
        length = 1100
    for window, nodes in itertools.product((0, length // 2), (5, 20)):
        compare(make("nhd", lengths=(length, length // 3), nodes=nodes, heads=(2, 1), window=window, device=device))


@pytest.mark.parametrize("page_size", [1, 7, 16, 256])  # slots; odd; usual; larger than the request
@pytest.mark.parametrize("format", ["nhd", "hnd"])
def test_page_sizes(backend: str, device: str, format: str, page_size: int) -> None:
    compare(make(format, page_size=page_size, lengths=(130, 15, 16), device=device, seed=page_size))


def test_a_window_beyond_all_hides_nothing(backend: str, device: str, is_slow: bool) -> None:
    case = make("nhd", nodes=12 if is_slow else 80, heads=(2, 1), device=device)
    want = case.run()
    for window in (2**31, 2**63 - 1):
        assert_bits(case.run(window=window), want)


def test_strided_query_and_interleaved_pools(backend: str, device: str) -> None:
    """A query out of a fused projection, [batch, heads, nodes, dim]; pools that hold keys and values in turns."""
    case = make("nhd", device=device)
    want = case.run()
    fused = torch.randn(*case.query.shape[:2], 9, 16).to(device)
    fused[:, :, 2:6] = case.query
    assert_bits(case.run(query=fused[:, :, 2:6]), want)
    assert_bits(case.run(query=case.query.transpose(1, 2).contiguous().transpose(1, 2)), want)
    pool = torch.stack([case.key, case.value], 1)  # [page, 2, slot, head, dim]
    assert_bits(case.run(key=pool[:, 0], value=pool[:, 1]), want)


def test_scales_and_scores_of_any_size(backend: str, device: str) -> None:
    for scale, nodes in itertools.product((0.0, 0.3, 50.0), (2, 40)):
        case = make(lengths=(200, 0, 70), nodes=nodes, scale=scale, device=device)  # blocks behind louder ones
        found, (want, logsumexp) = case.run(), exact(case)
        present = logsumexp.isfinite()
        torch.testing.assert_close(found.output.cpu()[present].double(), want[present], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.logsumexp.cpu()[present].double(), logsumexp[present], rtol=1e-6, atol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=st.sampled_from(FORMATS), lengths=st.lists(st.integers(0, 90), max_size=3).map(tuple),
    nodes=st.integers(1, 40), kv_heads=st.integers(1, 3), group=st.integers(1, 5),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)), page_size=st.integers(1, 33), window=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_every_shape(backend: str, device: str, is_slow: bool, **shape: Any) -> None:
    kv_heads, group = shape.pop("kv_heads"), shape.pop("group")
    if is_slow:
        shape["lengths"], shape["nodes"] = shape["lengths"][:1], min(shape["nodes"], 12)
    compare(make(heads=(kv_heads * group, kv_heads), device=device, **shape))


# --- what must not matter


@pytest.mark.parametrize("format", ["bhld", "hnd"])
@pytest.mark.parametrize("window", [0, 90])
def test_neither_batch_nor_slot_nor_padding_matters(backend: str, device: str, format: str, window: int) -> None:
    if backend == "reference":
        pytest.skip("the definition has no such promise")
    case = make(
        format, lengths=(300, 20, 0, 300), nodes=40, capacity=700, dims=(32, 32), window=window, device=device
    )  # fmt: skip
    whole = case.run()
    order = torch.tensor([2, 0, 3, 1], device=device)
    mixed = {"query": case.query[order], "lengths": case.lengths[order], "key": case.key, "value": case.value}
    if format == "bhld":
        mixed |= {"key": case.key[order], "value": case.value[order]}
    else:
        mixed |= {"block_table": case.keywords["block_table"][order]}
    shuffled = replace(case, parents=case.parents[order]).run(**mixed)
    assert_bits(shuffled, TreeAttention(*(t[order] for t in whole)))
    for b in range(4):
        one = case.alone(b)
        cut = {} if format == "hnd" else {name: getattr(one, name)[:, :, : 300 + 40] for name in ("key", "value")}
        found = one.run(**cut)
        width = found.output.shape[1]
        assert_bits(found, TreeAttention(whole.output[b : b + 1, :width], whole.logsumexp[b : b + 1, :width], found[2]))


@pytest.mark.parametrize("float8", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("nodes", [1, 4, 20])
def test_neither_threads_nor_instruction_sets_matter(threads: None, nodes: int, float8: torch.dtype | None) -> None:
    dims, window = ((50, 33), 30) if nodes == 4 else ((64, 48), 0)
    case = make(
        "nhd", lengths=(2500, 40), nodes=nodes, dims=dims, window=window, dtype=torch.bfloat16, float8=float8
    )  # fmt: skip
    want = case.run(backend="cpu")
    isa = torch.ops.specdec_kernels.cpu_isa()
    try:
        for wanted in range(isa + 1):
            torch.ops.specdec_kernels.set_cpu_isa(wanted)
            compare(case, case.run(backend="cpu"))
    finally:
        torch.ops.specdec_kernels.set_cpu_isa(isa)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        assert_bits(case.run(backend="cpu"), want)


def test_partial_attentions_merge_by_their_logsumexp(backend: str, device: str) -> None:
    case = make(lengths=(50, 40), ragged=False, device=device)
    whole, tail = case.run(), case.run(key=case.key[:, :, 30:], value=case.value[:, :, 30:], lengths=case.lengths - 30)
    scores = torch.einsum("bnhd,bhxd->bnhx", case.query, case.key[:, :, :30].repeat_interleave(2, 1)) / 4
    head = torch.einsum("bnhx,bhxd->bnhd", scores.softmax(-1), case.value[:, :, :30].repeat_interleave(2, 1))
    parts = torch.stack([scores.logsumexp(-1), tail.logsumexp])
    torch.testing.assert_close(parts.logsumexp(0), whole.logsumexp, rtol=1e-6, atol=1e-5)
    weight = parts.softmax(0)[..., None]
    torch.testing.assert_close(weight[0] * head + weight[1] * tail.output, whole.output, rtol=1e-5, atol=1e-5)


# --- bad input


@pytest.mark.parametrize("format", ["bhld", "nhd"])
def test_bad_lengths_are_flagged_and_harm_nobody(backend: str, device: str, format: str) -> None:
    case = make(format, lengths=(20, 30, 9), ragged=False, device=device)
    want = case.run()
    capacity = case.keys.shape[1] if format == "bhld" else -(-case.keys.shape[1] // 16) * 16
    for bad in (-1, capacity - 9 + 1, capacity, 10**6, 2**62, -(2**62)):
        lengths = case.lengths.clone()
        lengths[1] = bad
        found = case.run(lengths=lengths)
        assert found.status.tolist() == [0, 32, 0], bad
        assert not found.output[1].any() and bool((found.logsumexp[1] == -float("inf")).all())
        for b in (0, 2):
            assert_bits(TreeAttention(*(t[b] for t in found)), TreeAttention(*(t[b] for t in want)))
    narrow = case.run(lengths=case.lengths.int())
    assert_bits(narrow, want)


@pytest.mark.parametrize("entry", [-1, -7, 12, 2**31 - 1])  # no page; nonsense; one past the pool; far past it
@pytest.mark.parametrize("block", [0, 1, 2])  # cached; cached and the root; the last nodes
def test_bad_tables_are_flagged_and_harm_nobody(backend: str, device: str, block: int, entry: int) -> None:
    case = make("hnd", lengths=(20, 27, 9), ragged=False, device=device)  # 12 pages of 16
    assert case.key.shape[0] == 12
    want = case.run()
    table = case.keywords["block_table"].clone()
    table[1, block] = entry
    found = case.run(block_table=table)
    assert found.status.tolist() == [0, 32, 0]
    assert not found.output[1].any() and bool((found.logsumexp[1] == -float("inf")).all())
    for b in (0, 2):
        assert_bits(TreeAttention(*(t[b] for t in found)), TreeAttention(*(t[b] for t in want)))


def test_pages_that_nobody_reads_may_be_gone(backend: str, device: str) -> None:
    case = make("nhd", lengths=(70, 40), nodes=8, window=20, capacity=200, device=device)
    want = case.run()
    table = case.keywords["block_table"].clone()
    table[0, :3] = table[0, 5:] = -1  # positions 51 to 77 are read
    table[1, :1] = table[1, 3:] = -1  # 21 to 47
    assert_bits(case.run(block_table=table), want)
    compare(case)


def test_padding_and_empty_trees_attend_nothing(backend: str, device: str) -> None:
    case = make(lengths=(20, 30, 9), ragged=False, device=device)
    want = case.run()
    ancestors = tree_layout(case.parents, max_depth=8).ancestors.clone()
    ancestors[1] = 0
    found = case.run(ancestors=ancestors, key=case.key.index_fill(0, torch.tensor([1], device=device), NAN))
    assert found.status.tolist() == [0, 0, 0]
    assert not found.output[1].any() and bool((found.logsumexp[1] == -float("inf")).all())
    for b in (0, 2):
        assert_bits(TreeAttention(*(t[b] for t in found)), TreeAttention(*(t[b] for t in want)))


def test_padding_between_nodes_is_not_read(backend: str, device: str) -> None:
    case = make(lengths=(20,), nodes=5, ragged=False, device=device)
    case.parents = torch.tensor([[-1, 0, -1, 1, -1]], device=device)
    for rows in (case.key, case.value):
        rows[:, :, :25] = (case.keys if rows is case.key else case.values).float().transpose(1, 2)[:, :, :25].to(device)
        rows[:, :, [22, 24]] = NAN
    compare(case)


def test_what_a_gpu_has_no_registers_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from specdec_kernels.ops.tree_attention.triton_kernel import tree_attention_out

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for shape in ({"dims": (576, 512)}, {"float8": torch.float8_e5m2}):
        case = make("blhd", heads=(4, 1), **shape)
        ancestors = tree_layout(case.parents, max_depth=8, backend="reference").ancestors
        given = (case.query, case.key, case.value, ancestors, case.lengths, None, 1.0, 0, None, None)
        with pytest.raises(ValueError, match=r"query must be bfloat16 or float16 where dims exceed 256 or keys are"):
            tree_attention_out(*given, *case.run(backend="reference"))


# --- the calling conventions


def test_out_receives_the_results(backend: str, device: str) -> None:
    case = make("nhd", device=device)
    want = case.run()
    out = TreeAttention(*(torch.full_like(t, 7) for t in want))
    assert_bits(case.run(out=out), want)
    assert_bits(out, want)
    with pytest.raises(
        ValueError, match=r"tree_attention: out.status must be torch.int32 \[3\], got torch.int64 \[3\]"
    ):
        case.run(out=out._replace(status=out.status.long()))


@pytest.mark.parametrize("format", ["bhld", "nhd"])
def test_opcheck_and_compile(backend: str, device: str, format: str) -> None:
    if backend == "reference":
        pytest.skip("the reference is not an operator")
    case = make(format, window=9, device=device)
    ancestors = tree_layout(case.parents, max_depth=8, backend="reference").ancestors
    key, value = (t.transpose(1, 2) if format == "bhld" else t for t in (case.key, case.value))
    given = (
        case.query, key, value, ancestors, case.lengths, case.keywords.get("block_table"), 0.25,
        case.keywords["window"], None, None,
    )  # fmt: skip
    torch.library.opcheck(op.overload(backend), given)
    torch.library.opcheck(op.overload(backend, out=True), (*given, *case.run()))
    step = torch.compile(lambda q: case.run(query=q, ancestors=ancestors), fullgraph=True, backend="aot_eager")
    assert_bits(TreeAttention(*step(case.query)), case.run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": 3}, r"query must be a tensor \[batch, nodes, heads, dim\], got int"),
        ({"query": torch.zeros(2, 3, 4, 8).double()}, "query must be float32 or bfloat16 or float16, got float64"),
        ({"query": torch.zeros(2, 4, 8)}, r"query must be \[batch, nodes, heads, dim\], got \[2, 4, 8\]"),
        ({"query": torch.zeros(2, 0, 4, 8)}, r"query must be of 1 \(the root\) to 1024 nodes, got \[2, 0, 4, 8\]"),
        ({"query": torch.zeros(2, 3, 5, 8)}, "query must be of a multiple of 2 heads, the key's, got 5"),
        ({"query": torch.zeros(2, 3, 4, 16)[..., ::2]}, r"query must be dense in its last axis \(call .contiguous"),
        ({"query": torch.zeros(2, 3, 4, 577)}, "query must be of dim 1 to 576, got 577"),
        ({"key": torch.zeros(2, 2, 9, 8).half()}, "key must be float32 or float8_e4m3fn or float8_e5m2, got float16"),
        ({"value": FLOAT8}, "value must be torch.float32, as the key, got torch.float8_e4m3fn"),
        ({"value": torch.zeros(2, 2, 9, 513)}, "value must be of dim 1 to 512, got 513"),
        ({"scale": float("nan")}, "scale must be a number in .*, got nan"),
        ({"scale": "x"}, "scale must be a number in .*, got 'x'"),
        ({"key_scale": torch.ones(2)}, "key_scale must be None for keys in torch.float32, got Tensor"),
        ({"key": FLOAT8, "value": FLOAT8, "value_scale": torch.ones(3)}, r"value_scale must be \[2\], got \[3\]"),
        ({"key": FLOAT8, "value": FLOAT8, "key_scale": 0.5}, r"key_scale must be a tensor of float32, got float"),
        ({"key": torch.zeros(2, 9, 8)}, r"key must be \[batch, head, length, dim\], got \[2, 9, 8\]"),
        ({"key": torch.zeros(2, 2, 9, 4)}, "key must be of dim 8, as the query, got 4"),
        ({"key": torch.zeros(3, 2, 9, 8), "value": torch.zeros(3, 2, 9, 8)}, "key must be of batch 2, got 3"),
        ({"value": torch.zeros(2, 2, 8, 8)}, r"value must be as key but for its dim, \[2, 2, 9\], got \[2, 2, 8\]"),
        ({"ancestors": torch.zeros(2, 3, 1)}, "ancestors must be int32, got float32"),
        ({"ancestors": torch.zeros(2, 3, 2).int()}, r"ancestors must be \[2, 3, 1\], got \[2, 3, 2\]"),
        ({"lengths": torch.zeros(2)}, "lengths must be int32 or int64, got float32"),
        ({"lengths": torch.zeros(3).long()}, r"lengths must be \[2\], got \[3\]"),
        ({"format": "lbhd"}, "format must be one of 'bhld', 'blhd', 'hnd', 'nhd', 'slots', got 'lbhd'"),
        ({"format": "nhd"}, "block_table must be a tensor of int32 or int64, got NoneType"),
        ({"block_table": torch.zeros(2, 1).int()}, "block_table must be None for format 'bhld', got Tensor"),
        (
            {"format": "nhd", "block_table": torch.zeros(3, 1).int(), "key": torch.zeros(5, 4, 2, 8),
             "value": torch.zeros(5, 4, 2, 8)},
            r"block_table must be \[2, pages\], got \[3, 1\]",
        ),
        ({"window": -1}, "window must be a host int >= 0, got -1"),
        ({"backend": "numpy"}, "backend must be one of reference, "),
    ],
)  # fmt: skip
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 3, 4, 8), "key": torch.zeros(2, 2, 9, 8), "value": torch.zeros(2, 2, 9, 8),
        "ancestors": torch.zeros(2, 3, 1).int(), "lengths": torch.zeros(2).long(), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match="tree_attention: " + message):
        tree_attention(**arguments)
