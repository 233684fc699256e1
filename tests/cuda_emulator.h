// Runs CUDA C kernels on the CPU, so that they can be tested without a GPU.
//
// Every CUDA thread of a block is a fiber; the blocks of a grid run one after another. A fiber runs until it waits for
// others: at a barrier, or in a warp collective. Warps run ahead of each other as far as the kernel's barriers allow and
// lanes run in a chosen order (forward, backward, shuffled), so a missing barrier, or lanes taken to run in lockstep, give
// a wrong result; under -fsanitize=thread they are reported as data races. Found at run time: barriers and collectives
// that not all lanes reach, lanes that disagree on a collective, accesses outside a guarded buffer, shared memory that is
// read before it is written (it holds NaN at the start of every block).
//
// The test driver (cuda_emulator.py) puts this header in front of the unchanged kernel source.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))
#else
// Without the sanitizer these do nothing.
static inline void* __tsan_create_fiber(unsigned) { return nullptr; }
static inline void __tsan_switch_to_fiber(void*, unsigned) {}
static inline void* __tsan_get_current_fiber() { return nullptr; }
static inline void __tsan_acquire(void*) {}
static inline void __tsan_release(void*) {}
#define EMU_UNCHECKED
#endif

// ---- the language

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// One block runs at a time, so shared memory is static memory; the section makes it one range to be poisoned.
#define __shared__ static __attribute__((section("emu_shared")))
#define LC_DYNAMIC_SHARED(type, name) type* name = (type*)emu::dynamic_shared
extern "C" char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emu {

struct Index {
  unsigned x, y, z;
};

enum State : uint8_t { RUNNING, AT_COLLECTIVE, AT_BARRIER, DONE };
enum Operation : uint8_t { SYNC, BALLOT, SHUFFLE, MATCH, SUM, LEAST, MOST };

struct Warp;

struct Fiber {
  Index thread;
  unsigned lane;
  Warp* warp;
  State state;
  // the collective that it waits in
  Operation operation;
  uint32_t mask;
  int source;
  uint64_t given, result;
  void* sanitizer;
  char* stack;
  void* stack_pointer;
  ucontext_t context;
};

// What the sanitizer knows barriers by. Fibers resume one after another, and those that have may be at the next barrier
// while others still leave this one, which must not learn from them what is ordered: so barriers alternate.
struct Ordering {
  char barriers[2];
  unsigned passed;

  EMU_UNCHECKED void* current() { return &barriers[passed & 1]; }
};

struct Warp {
  uint32_t waiting, exited, present;
  Fiber* lanes;
  Ordering syncs;
};

constexpr size_t STACK_BYTES = 256 << 10;
constexpr unsigned MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32;
enum Order { FORWARD, BACKWARD, SHUFFLED };

static Fiber fibers[MAX_THREADS];
static Warp warps[MAX_WARPS];
static unsigned warp_order[MAX_WARPS], lane_order[32];
static Fiber* current;
static unsigned num_threads, live, arrived, votes;
static Ordering barriers;
static char block_begins, block_ends;
static Index block_index, block_size, grid_size;
static void (*entry)(void**);
static void** entry_arguments;
alignas(128) static char dynamic_shared[100 << 10];
static char error[512];
static sigjmp_buf failed;
static uint64_t random_state;
static void* main_sanitizer;

// ---- switching between the scheduler and a fiber

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
// swapcontext makes two system calls; this makes none.
static void* main_stack_pointer;
extern "C" void emu_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(".text\n.hidden emu_switch\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emu_switch,.-emu_switch\n");

EMU_UNCHECKED static void prepare(Fiber& fiber, void (*start)()) {
  constexpr int SAVED = 6;  // registers below the return address
  void** top = (void**)(fiber.stack + STACK_BYTES) - 2;  // the stack is then aligned as after a call
  top[0] = (void*)start, top[1] = nullptr;
  memset(top - SAVED, 0, SAVED * sizeof(void*));
  fiber.stack_pointer = top - SAVED;
}
EMU_UNCHECKED static void enter(Fiber& fiber) { emu_switch(&main_stack_pointer, fiber.stack_pointer); }
EMU_UNCHECKED static void leave(Fiber& fiber) { emu_switch(&fiber.stack_pointer, main_stack_pointer); }
#else
static ucontext_t main_context;

EMU_UNCHECKED static void prepare(Fiber& fiber, void (*start)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, start, 0);
}
EMU_UNCHECKED static void enter(Fiber& fiber) { swapcontext(&main_context, &fiber.context); }
EMU_UNCHECKED static void leave(Fiber& fiber) { swapcontext(&fiber.context, &main_context); }
#endif

constexpr unsigned NO_ORDER = 1;  // for the sanitizer: a switch orders no memory accesses

EMU_UNCHECKED static void to_scheduler() {
  __tsan_switch_to_fiber(main_sanitizer, NO_ORDER);
  leave(*current);
}

EMU_UNCHECKED static void resume(Fiber& fiber) {
  current = &fiber;
  __tsan_switch_to_fiber(fiber.sanitizer, NO_ORDER);
  enter(fiber);
}

[[noreturn]] EMU_UNCHECKED static void fail(const char* what) {
  const Index at = current ? current->thread : Index{0, 0, 0};
  snprintf(error, sizeof error, "%s [block %u, thread %u]", what, block_index.x, at.x);
  __tsan_switch_to_fiber(main_sanitizer, NO_ORDER);
  siglongjmp(failed, 1);
}

// ---- warp collectives

EMU_UNCHECKED static uint32_t expected(const Warp& warp, uint32_t mask) { return mask & warp.present & ~warp.exited; }

EMU_UNCHECKED static uint64_t result_for(const Warp& warp, uint32_t members, const Fiber& fiber) {
  if (fiber.operation == SYNC) return 0;
  if (fiber.operation == SHUFFLE)  // what an absent lane gives is undefined on a GPU
    return members >> fiber.source & 1 ? warp.lanes[fiber.source].given : 0xFFFFFFFFFFFFFFFFull;
  uint32_t bits = 0, sum = 0, least = UINT32_MAX, most = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (!(members >> i & 1)) continue;
    const uint32_t given = (uint32_t)warp.lanes[i].given;
    bits |= (uint32_t)(fiber.operation == MATCH ? given == (uint32_t)fiber.given : given != 0) << i;
    sum += given, least = given < least ? given : least, most = given > most ? given : most;
  }
  return fiber.operation == SUM ? sum : fiber.operation == LEAST ? least : fiber.operation == MOST ? most : bits;
}

EMU_UNCHECKED static void complete(Warp& warp, uint32_t mask, Operation operation) {
  const uint32_t members = expected(warp, mask);
  for (unsigned i = 0; i < 32; ++i) {
    Fiber& fiber = warp.lanes[i];
    if (!(members >> i & 1)) continue;
    if (fiber.operation != operation || fiber.mask != mask) {
      current = &fiber;
      fail("warp collective: lanes disagree on the operation or the mask");
    }
    fiber.result = result_for(warp, members, fiber);
  }
  for (unsigned i = 0; i < 32; ++i)
    if (members >> i & 1) warp.lanes[i].state = RUNNING;
  warp.waiting &= ~members;
  if (operation == SYNC) ++warp.syncs.passed;
}

EMU_UNCHECKED static uint64_t collective(Operation operation, uint32_t mask, uint64_t given, int source) {
  Fiber& fiber = *current;
  Warp& warp = *fiber.warp;
  if (!(mask >> fiber.lane & 1)) fail("warp collective: the calling lane is not in its own mask");
  fiber.operation = operation, fiber.mask = mask, fiber.given = given, fiber.source = source;
  fiber.state = AT_COLLECTIVE;
  warp.waiting |= 1u << fiber.lane;
  void* const order = warp.syncs.current();
  if (operation == SYNC) __tsan_release(order);  // the others order no memory accesses
  const uint32_t needed = expected(warp, mask);
  if ((warp.waiting & needed) == needed) complete(warp, mask, operation);
  while (fiber.state != RUNNING) to_scheduler();
  if (operation == SYNC) __tsan_acquire(order);
  return fiber.result;
}

// ---- block barriers

EMU_UNCHECKED static void open_barrier_if_all_wait() {
  if (!arrived || arrived != live) return;
  for (unsigned i = 0; i < num_threads; ++i)
    if (fibers[i].state == AT_BARRIER) fibers[i].state = RUNNING, fibers[i].result = votes;
  arrived = votes = 0, ++barriers.passed;
}

EMU_UNCHECKED static unsigned barrier(bool vote) {
  Fiber& fiber = *current;
  fiber.state = AT_BARRIER;
  ++arrived, votes += vote;
  void* const order = barriers.current();
  __tsan_release(order);
  open_barrier_if_all_wait();
  while (fiber.state != RUNNING) to_scheduler();
  __tsan_acquire(order);
  return (unsigned)fiber.result;
}

// ---- blocks

EMU_UNCHECKED static void run_thread() {
  for (;;) {
    __tsan_acquire(&block_begins);
    entry(entry_arguments);
    __tsan_release(&block_ends);
    Fiber& fiber = *current;
    Warp& warp = *fiber.warp;
    fiber.state = DONE, --live, warp.exited |= 1u << fiber.lane;
    for (unsigned i = 0; i < 32; ++i) {  // the exit of a lane can be what a collective waited for
      const uint32_t needed = expected(warp, warp.lanes[i].mask);
      if (warp.waiting >> i & 1 && (warp.waiting & needed) == needed)
        complete(warp, warp.lanes[i].mask, warp.lanes[i].operation);
    }
    open_barrier_if_all_wait();
    to_scheduler();
  }
}

EMU_UNCHECKED static unsigned random_below(unsigned n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return (unsigned)((random_state >> 11) % n);
}

EMU_UNCHECKED static void shuffle(unsigned* order, unsigned n) {
  for (unsigned i = n; i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
}

// Run a warp until all its lanes wait for the block, or, shuffled, for a while. Returns whether anything ran.
EMU_UNCHECKED static bool run_warp(Warp& warp, int order) {
  bool ran = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned lane = lane_order[i];
      if (!(warp.present >> lane & 1) || warp.lanes[lane].state != RUNNING) continue;
      resume(warp.lanes[lane]);
      ran = again = true;
    }
    if (order == SHUFFLED && random_below(4) == 0) break;
  }
  return ran;
}

EMU_UNCHECKED static void run_block(int order) {
  const unsigned num_warps = (num_threads + 31) / 32;
  live = num_threads, arrived = votes = 0;
  if (__start_emu_shared) memset(__start_emu_shared, 0xFF, (size_t)(__stop_emu_shared - __start_emu_shared));
  for (unsigned i = 0; i < num_threads; ++i) fibers[i].state = RUNNING;
  for (unsigned w = 0; w < num_warps; ++w) warps[w].waiting = warps[w].exited = 0;
  __tsan_release(&block_begins);
  while (live) {
    if (order == SHUFFLED) shuffle(warp_order, num_warps), shuffle(lane_order, 32);
    bool ran = false;
    for (unsigned w = 0; w < num_warps; ++w) ran |= run_warp(warps[warp_order[w]], order);
    if (!ran) fail("deadlock: threads wait for others that do not come");
  }
  __tsan_acquire(&block_ends);
}

EMU_UNCHECKED static void set_up(int order) {
  const unsigned num_warps = (num_threads + 31) / 32;
  main_sanitizer = __tsan_get_current_fiber();
  for (unsigned w = 0; w < num_warps; ++w) warps[w].lanes = fibers + 32 * w, warps[w].present = 0;
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) {
      const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      fiber.stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
      mprotect(fiber.stack, 4096, PROT_NONE);
      fiber.sanitizer = __tsan_create_fiber(0);
    }
    prepare(fiber, run_thread);
    fiber.thread = {i, 0, 0}, fiber.lane = i % 32, fiber.warp = &warps[i / 32];
    fiber.warp->present |= 1u << fiber.lane;
  }
  for (unsigned w = 0; w < num_warps; ++w) warp_order[w] = order == BACKWARD ? num_warps - 1 - w : w;
  for (unsigned i = 0; i < 32; ++i) lane_order[i] = order == BACKWARD ? 31 - i : i;
}

EMU_UNCHECKED static void on_bad_access(int, siginfo_t* info, void*) {
  static char what[96];
  snprintf(what, sizeof what, "bad memory access at %p", info->si_addr);
  fail(what);
}

// A guarded buffer ends at a page that cannot be accessed, and is filled with a pattern.
constexpr size_t PAGE = 4096;
constexpr unsigned char PATTERN = 0xA5;

static size_t padded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Kernel {
  const char *name, *signature;
  void (*call)(void**);
  Kernel* next;
};
static Kernel* kernels;

struct Registration {
  Kernel kernel;
  Registration(const char* name, const char* signature, void (*call)(void**)) : kernel{name, signature, call, kernels} {
    kernels = &kernel;
  }
};

template <class T>
constexpr char letter() {  // as in compress/kernels.py
  if (std::is_pointer<T>::value) return 'p';
  if (std::is_same<T, float>::value) return 'f';
  return sizeof(T) == 8 ? (std::is_signed<T>::value ? 'l' : 'u') : std::is_signed<T>::value ? 'i' : 'w';
}

template <class... Parameters>
struct Signature {
  static constexpr char text[] = {letter<Parameters>()..., 0};
};

template <auto function>
struct Caller;

template <class... Parameters, void (*function)(Parameters...)>
struct Caller<function> {
  static constexpr const char* signature = Signature<Parameters...>::text;
  template <size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    function(*(Parameters*)arguments[I]...);
  }
  static void run(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>()); }
};

}  // namespace emu

#define EMU_KERNEL(name) \
  static emu::Registration emu_##name(#name, emu::Caller<&name>::signature, emu::Caller<&name>::run);

#define threadIdx (emu::current->thread)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)

// ---- built-in functions

static inline void __syncthreads() { emu::barrier(false); }
static inline int __syncthreads_or(int vote) { return emu::barrier(vote != 0) != 0; }
static inline int __syncthreads_count(int vote) { return (int)emu::barrier(vote != 0); }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emu::collective(emu::SYNC, mask, 0, 0); }
static inline unsigned __ballot_sync(unsigned mask, int vote) {
  return (unsigned)emu::collective(emu::BALLOT, mask, vote != 0, 0);
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return (unsigned)emu::collective(emu::SUM, mask, v, 0);
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return (unsigned)emu::collective(emu::LEAST, mask, v, 0);
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return (unsigned)emu::collective(emu::MOST, mask, v, 0);
}

template <class T>
static inline T emu_shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4, "only words are shuffled");
  uint64_t given = 0;
  memcpy(&given, &value, sizeof value);
  const uint64_t taken = emu::collective(emu::SHUFFLE, mask, given, source);
  memcpy(&value, &taken, sizeof value);
  return value;
}
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source) {
  return emu_shuffle(mask, value, source & 31);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int flip) {
  return emu_shuffle(mask, value, (int)emu::current->lane ^ flip);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  const int lane = (int)emu::current->lane;
  return emu_shuffle(mask, value, lane >= (int)by ? lane - (int)by : lane);
}

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int min(int a, int b) { return b < a ? b : a; }
static inline int max(int a, int b) { return a < b ? b : a; }
static inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
static inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
template <class T>
static inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
static inline void __stcs(T* p, T v) {
  *p = v;
}
// Fibers switch in collectives only, so these are atomic anyway; the sanitizer must see that they mean to be.
static inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

// ---- what the test driver calls

extern "C" {

const char* emu_error() { return emu::error; }

const char* emu_signature(const char* name) {
  for (emu::Kernel* k = emu::kernels; k; k = k->next)
    if (!strcmp(k->name, name)) return k->signature;
  return nullptr;
}

// Returns 0, or 1 and a text for emu_error.
EMU_UNCHECKED int emu_launch(const char* name, unsigned grid, unsigned threads, unsigned shared_bytes, void** arguments,
                             int order, uint64_t seed) {
  using namespace emu;
  Kernel* kernel = kernels;
  while (kernel && strcmp(kernel->name, name)) kernel = kernel->next;
  if (!kernel || !grid || !threads || threads > MAX_THREADS || shared_bytes > sizeof dynamic_shared) {
    snprintf(error, sizeof error, "cannot launch %s with grid %u, %u threads, %u bytes", name, grid, threads, shared_bytes);
    return 1;
  }
  entry = kernel->call, entry_arguments = arguments, random_state = seed * 2 + 0x9E3779B97F4A7C15ull;
  num_threads = threads, block_size = {threads, 1, 1}, grid_size = {grid, 1, 1};
  set_up(order);
  struct sigaction action = {}, old_segv, old_bus;
  static char signal_stack[64 << 10];
  stack_t alternate = {}, old_stack;
  alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
  action.sa_sigaction = on_bad_access, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaltstack(&alternate, &old_stack), sigaction(SIGSEGV, &action, &old_segv), sigaction(SIGBUS, &action, &old_bus);
  volatile int failures = 0;
  if (sigsetjmp(failed, 1) == 0) {
    for (unsigned i = 0; i < grid; ++i) {
      block_index = {order == BACKWARD ? grid - 1 - i : i, 0, 0};
      memset(dynamic_shared, 0xFF, shared_bytes);
      run_block(order);
    }
  } else {
    failures = 1;
  }
  current = nullptr;
  sigaction(SIGSEGV, &old_segv, nullptr), sigaction(SIGBUS, &old_bus, nullptr), sigaltstack(&old_stack, nullptr);
  return failures;
}

void* emu_allocate(size_t bytes) {
  using namespace emu;
  const size_t body = padded(bytes, 16), pages = padded(body, PAGE);
  char* p = (char*)mmap(nullptr, pages + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(p, PAGE, PROT_NONE), mprotect(p + PAGE + pages, PAGE, PROT_NONE);
  memset(p + PAGE, PATTERN, pages);
  return p + PAGE + pages - body;
}

// Whether something was written around the buffer where that is possible.
int emu_release(void* buffer, size_t bytes) {
  using namespace emu;
  const size_t body = padded(bytes, 16), pages = padded(body, PAGE);
  unsigned char *at = (unsigned char*)buffer, *first = at + body - pages;
  int damaged = 0;
  for (unsigned char* p = first; p < at; ++p) damaged |= *p != PATTERN;
  for (unsigned char* p = at + bytes; p < at + body; ++p) damaged |= *p != PATTERN;
  munmap(first - PAGE, pages + 2 * PAGE);
  return damaged;
}
}
