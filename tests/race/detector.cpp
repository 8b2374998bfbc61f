// Finds data races of CUDA kernels that run on the host: the runtime behind the calls that the
// compiler's ThreadSanitizer pass (-fsanitize=thread) puts before every access. Two accesses to a
// byte, at least one a store and at least one not atomic, race unless one is ordered before the
// other, in whatever order they happened to run here. Order is that of the CUDA memory model:
//   a thread's own program; barriers among the threads that meet; the boundary between two kernels;
//   fence, then atomic -> an atomic that reads what it wrote, then fence.
// Shuffles order nothing, nor does an atomic alone. A thread's knowledge is a vector clock:
// `known[t]` is the number of thread t's last step that is ordered before this thread's next one.
//
// ThreadSanitizer's own library is not used: it holds at most 256 threads apart, remembers four
// accesses a word, and has the order of C++ threads.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "order.h"

namespace {

using Steps = std::vector<uint32_t>;  // of the threads of a launch; those behind the end: 0
using Clock = std::shared_ptr<const Steps>;

void raise_to(Steps& steps, const Clock& other) {
  if (!other) return;
  if (steps.size() < other->size()) steps.resize(other->size());
  for (size_t t = 0; t < other->size(); ++t) steps[t] = std::max(steps[t], (*other)[t]);
}

Clock join(const Clock& a, const Clock& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  Steps all = *a;
  raise_to(all, b);
  return std::make_shared<const Steps>(std::move(all));
}

struct Thread {
  uint32_t step = 1;
  uint32_t context = 0;  // call stack
  Clock known;           // ordered before what the thread does next
  Clock fenced;  // what its last fence, or that of a thread it met since, covers: an atomic passes
                 // it on
  Clock seen;    // what its atomics have read; the next fence makes it known
};

struct Access {
  const void* at;  // return address of the compiler's call
  uint32_t thread, step, context;
  uint8_t bytes;  // of the word, a bit each
  bool is_write, is_atomic;
};

struct Word {                  // of kWord bytes
  std::vector<Access> writes;  // the last one of every byte
  std::vector<Access> reads;   // since then; those that a later read is ordered behind are dropped
  size_t prune_at = 64;        // reads
  Clock passed_on;             // by the atomics on it
};
constexpr uintptr_t kWord = 4, kPage = 4096;
using Page = std::array<Word, kPage / kWord>;

struct Range {
  uintptr_t first = 0, end = 0;
  bool holds(uintptr_t address) const { return address - first < end - first; }
};

// A call: the function's caller and a place in the function, below another context.
struct Call {
  uint32_t below;
  const void *caller, *inside;
  bool operator==(const Call&) const = default;
};
struct CallHash {
  size_t operator()(const Call& c) const {
    return (c.below * 0x9E3779B97F4A7C15u) ^ (reinterpret_cast<uintptr_t>(c.caller) * 31) ^
           reinterpret_cast<uintptr_t>(c.inside);
  }
};

struct Detector {
  std::vector<Thread> threads;  // of the launch
  unsigned block_threads = 0, block = 0, current = 0;
  Range own_stack, host_stack, image;
  std::vector<Range> shared;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
  uintptr_t last_page = 0;
  Page* last = nullptr;
  std::vector<Call> calls{Call{}};
  std::unordered_map<Call, uint32_t, CallHash> numbers;
  void (*give_up)() = nullptr;
  bool has_raced = false;
  Access raced[2];
  uintptr_t raced_at = 0;
};

Detector& d = *new Detector;  // outlives every kernel
bool is_running = false;      // a kernel's thread, not the host run around it

// Static data is the host run's own; kernels here have none.
Range image_of(const void* inside) {
  struct Search {
    uintptr_t wanted;
    Range found;
  } search{reinterpret_cast<uintptr_t>(inside), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& s = *static_cast<Search*>(data);
        Range all{~uintptr_t{0}, 0};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          if (part.p_type != PT_LOAD) continue;
          all.first = std::min<uintptr_t>(all.first, info->dlpi_addr + part.p_vaddr);
          all.end = std::max<uintptr_t>(all.end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
        }
        if (!all.holds(s.wanted)) return 0;
        s.found = all;
        return 1;
      },
      &search);
  return search.found;
}

Range stack_of_this_thread() {
  pthread_attr_t attributes;
  void* low = nullptr;
  size_t size = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &size);
  pthread_attr_destroy(&attributes);
  return {reinterpret_cast<uintptr_t>(low), reinterpret_cast<uintptr_t>(low) + size};
}

Word& word_at(uintptr_t address) {
  const uintptr_t page = address / kPage;
  if (d.last == nullptr || d.last_page != page) {
    std::unique_ptr<Page>& found = d.pages[page];
    if (!found) found = std::make_unique<Page>();
    d.last = found.get();
    d.last_page = page;
  }
  return (*d.last)[address % kPage / kWord];
}

bool is_before(const Access& a, const Thread& me) {
  if (a.thread == d.current) return true;
  return me.known && a.thread < me.known->size() && (*me.known)[a.thread] >= a.step;
}

void compare(const std::vector<Access>& earlier, const Access& now, const Thread& me,
             uintptr_t address) {
  for (const Access& a : earlier) {
    if ((a.bytes & now.bytes) == 0 || (a.is_atomic && now.is_atomic) || is_before(a, me)) continue;
    d.has_raced = true;
    d.raced[0] = a;
    d.raced[1] = now;
    d.raced_at = address;
    is_running = false;
    d.give_up();
  }
}

void note(Word& word, const Access& now, const Thread& me, uintptr_t address) {
  compare(word.writes, now, me, address);
  if (now.is_write) {
    compare(word.reads, now, me, address);
    const auto is_covered = [&](const Access& a) { return (a.bytes & ~now.bytes) == 0; };
    std::erase_if(word.writes, is_covered);
    std::erase_if(word.reads, is_covered);
    word.writes.push_back(now);
    if (!now.is_atomic) word.passed_on = nullptr;
    return;
  }
  if (!word.reads.empty()) {
    Access& a = word.reads.back();
    if (a.thread == now.thread && a.step == now.step && a.bytes == now.bytes) return;
  }
  if (word.reads.size() >= word.prune_at) {
    std::erase_if(word.reads,
                  [&](const Access& a) { return (a.bytes & ~now.bytes) == 0 && is_before(a, me); });
    word.prune_at = 2 * word.reads.size() + 64;
  }
  word.reads.push_back(now);
}

void access(const void* at, const void* data, size_t size, bool is_write, bool is_atomic = false) {
  auto first = reinterpret_cast<uintptr_t>(data);
  if (!is_running || d.own_stack.holds(first) || d.image.holds(first) || d.host_stack.holds(first))
    return;
  const Thread& me = d.threads[d.current];
  Access now{at, d.current, me.step, me.context, 0, is_write, is_atomic};
  const uintptr_t end = first + size;
  while (first < end) {
    const uintptr_t word = first / kWord * kWord, stop = std::min(end, word + kWord);
    now.bytes = static_cast<uint8_t>(((1u << (stop - first)) - 1) << (first - word));
    note(word_at(word), now, me, first);
    first = stop;
  }
}

__attribute__((noinline)) void enter(const void* caller, const void* inside) {
  Thread& me = d.threads[d.current];
  const Call call{me.context, caller, inside};
  const auto [place, is_new] = d.numbers.try_emplace(call, static_cast<uint32_t>(d.calls.size()));
  if (is_new) d.calls.push_back(call);
  me.context = place->second;
}

// What a command prints, without the lines below the kernel.
std::string run(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char* line = nullptr;
  size_t room = 0;
  while (getline(&line, &room, pipe) > 0) {
    const std::string one = line;
    const auto has = [&](const char* word) { return one.find(word) != one.npos; };
    if (!has("??") && !has("cuda_on_host::entry") && !has("/invoke.h") && !has("std_function.h") &&
        !has("std::_Function_handler")) {
      text += "  " + one;
    }
  }
  free(line);
  pclose(pipe);
  return text;
}

// Functions and lines at return addresses, innermost first, inlined ones too.
std::string lines(const std::vector<const void*>& places) {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&image_of), &info);
  std::string command = "addr2line -Cfipe '" + std::string(info.dli_fname) + "'";
  for (const void* place : places) {
    char number[32];
    const auto offset =
        reinterpret_cast<uintptr_t>(place) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
    std::snprintf(number, sizeof number, " 0x%zx", offset);
    command += number;
  }
  return run(command);
}

std::string story(const Access& a) {
  std::vector<const void*> places{a.at};
  for (uint32_t c = a.context; c != 0; c = d.calls[c].below) places.push_back(d.calls[c].caller);
  const char* kind = a.is_atomic ? "atomic" : a.is_write ? "store" : "load";
  return kind + (" of thread " + std::to_string(a.thread % d.block_threads)) + ", block " +
         std::to_string(a.thread / d.block_threads) + "\n" + lines(places);
}

}  // namespace

namespace order {

void begin_launch(unsigned blocks, unsigned threads, void (*give_up)()) {
  d.threads.assign(size_t{blocks} * threads, Thread{});
  d.block_threads = threads;
  d.pages.clear();
  d.last = nullptr;
  d.give_up = give_up;
  d.has_raced = false;
  d.image = image_of(&is_running);
  d.host_stack = stack_of_this_thread();
}

void end_launch() {
  if (!d.has_raced) return;
  const auto is_shared = [](const Range& r) { return r.holds(d.raced_at); };
  const bool shared = std::any_of(d.shared.begin(), d.shared.end(), is_shared);
  throw std::runtime_error(std::string("data race in ") + (shared ? "shared" : "global") +
                           " memory: " + story(d.raced[1]) + "is not ordered behind the " +
                           story(d.raced[0]));
}

void begin_block(unsigned block) {
  d.block = block;
  for (const Range& r : d.shared) {
    for (uintptr_t word = r.first / kWord * kWord; word < r.end; word += kWord)
      word_at(word) = Word{};
  }
}

void add_shared(const void* data, size_t size) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  d.shared.push_back({first, first + size});
}

void resume(unsigned thread, const void* stack, size_t size) {
  const auto first = reinterpret_cast<uintptr_t>(stack);
  d.own_stack = {first, first + size};
  d.current = d.block * d.block_threads + thread;
  is_running = true;
}

void pause() { is_running = false; }

void meet(unsigned first, unsigned last, bool (*is_absent)(unsigned)) {
  Steps known, fenced, seen;
  Clock last_known, last_fenced, last_seen;
  const auto add = [](Steps& all, const Clock& one, Clock& before) {
    if (one != before) raise_to(all, one);
    before = one;
  };
  Thread* const threads = d.threads.data() + size_t{d.block} * d.block_threads;
  const auto own = static_cast<size_t>(threads - d.threads.data());
  for (unsigned t = first; t < last; ++t) {
    if (is_absent(t)) continue;
    add(known, threads[t].known, last_known);
    add(fenced, threads[t].fenced, last_fenced);
    add(seen, threads[t].seen, last_seen);
  }
  if (known.size() < own + last) known.resize(own + last);
  for (unsigned t = first; t < last; ++t) {
    if (!is_absent(t)) known[own + t] = threads[t].step++;
  }
  const auto shared = [](Steps&& steps) {
    return steps.empty() ? Clock() : std::make_shared<const Steps>(std::move(steps));
  };
  const Clock all_known = shared(std::move(known)), all_fenced = shared(std::move(fenced)),
              all_seen = shared(std::move(seen));
  for (unsigned t = first; t < last; ++t) {
    if (is_absent(t)) continue;
    threads[t].known = all_known;
    threads[t].fenced = all_fenced;
    threads[t].seen = all_seen;
  }
}

void fence() {
  Thread& me = d.threads[d.current];
  me.known = join(me.known, me.seen);
  Steps covered = me.known ? *me.known : Steps();
  if (covered.size() <= d.current) covered.resize(d.current + 1);
  covered[d.current] = me.step++;
  me.fenced = std::make_shared<const Steps>(std::move(covered));
}

void atomic(const void* address, size_t size) {
  access(__builtin_return_address(0), address, size, true, true);
  Thread& me = d.threads[d.current];
  Word& word = word_at(reinterpret_cast<uintptr_t>(address) / kWord * kWord);
  me.seen = join(me.seen, word.passed_on);
  word.passed_on = join(word.passed_on, me.fenced);
}

}  // namespace order

extern "C" {
__attribute__((visibility("default"))) int race_twin = 0;

// Addresses inside every function that a kernel has entered, as offsets into this library; how many
// there are.
__attribute__((visibility("default"))) size_t race_entered(uintptr_t* offsets, size_t room) {
  std::set<uintptr_t> found;
  for (const Call& call : d.calls) {
    if (call.inside != nullptr)
      found.insert(reinterpret_cast<uintptr_t>(call.inside) - d.image.first);
  }
  size_t n = 0;
  for (const uintptr_t offset : found) {
    if (n < room) offsets[n] = offset;
    ++n;
  }
  return n;
}

#define HERE __builtin_return_address(0)
void __tsan_init() {}
void __tsan_func_entry(void* caller) {
  if (is_running) enter(caller, HERE);
}
void __tsan_func_exit() {
  if (is_running) d.threads[d.current].context = d.calls[d.threads[d.current].context].below;
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* data, size_t size) { access(HERE, data, size, false); }
void __tsan_write_range(void* data, size_t size) { access(HERE, data, size, true); }
#define ACCESSES(size)                                                              \
  void __tsan_read##size(void* data) { access(HERE, data, size, false); }           \
  void __tsan_write##size(void* data) { access(HERE, data, size, true); }           \
  void __tsan_unaligned_read##size(void* data) { access(HERE, data, size, false); } \
  void __tsan_unaligned_write##size(void* data) { access(HERE, data, size, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
// Atomics of C++ are the host code's: guards of static variables, counts of references.
char __tsan_atomic8_load(const volatile char* data, int) {
  return __atomic_load_n(data, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_fetch_add(volatile int* data, int value, int) {
  return __atomic_fetch_add(data, value, __ATOMIC_SEQ_CST);
}
}
