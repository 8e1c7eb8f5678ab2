// Work is handed out item by item, so that a thread whose core is taken away for a while delays one item only.
//
// The threads are those of the OpenMP runtime that torch has loaded: a pool of our own would fight with its threads,
// which keep spinning for a while after each of torch's operations. Without such a runtime a call starts its threads.
#include "parallel.h"

#include <dlfcn.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace {

struct Job {
  std::atomic<int64_t> next{0};
  int64_t num_items;
  void (*body)(void*, int64_t);
  void* context;
};

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  for (int64_t item; (item = job.next.fetch_add(1, std::memory_order_relaxed)) < job.num_items;)
    job.body(job.context, item);
}

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_openmp() { return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

struct Scratch {
  void* memory = nullptr;
  size_t capacity = 0;
  ~Scratch() { free(memory); }
};

constexpr int kNumSlots = 3;
constexpr size_t kLargePage = size_t(2) << 20;

}  // namespace

void ft_parallel_for(int64_t num_items, int num_threads, void (*body)(void*, int64_t), void* context) {
  Job job;
  job.num_items = num_items;
  job.body = body;
  job.context = context;
  if (num_threads > num_items) num_threads = static_cast<int>(num_items);
  if (num_threads <= 1) {
    work(&job);
    return;
  }
  static const GompParallel openmp = find_openmp();
  if (openmp) {
    openmp(work, &job, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::thread> threads;
  try {
    for (int index = 1; index < num_threads; ++index) threads.emplace_back(work, &job);
  } catch (const std::system_error&) {
    // no more threads to be had: those there are do the work
  }
  work(&job);
  for (std::thread& thread : threads) thread.join();
}

void* ft_scratch(int slot, size_t num_bytes) {
  thread_local Scratch scratch[kNumSlots];
  Scratch& own = scratch[slot];
  if (own.capacity >= num_bytes && own.memory) return own.memory;
  free(own.memory);
  own.memory = nullptr;
  own.capacity = 0;
  const size_t alignment = num_bytes >= 2 * kLargePage ? kLargePage : 4096;
  const size_t capacity = (num_bytes + alignment) / alignment * alignment;
  if (posix_memalign(&own.memory, alignment, capacity) != 0) {
    own.memory = nullptr;
    return nullptr;
  }
#ifdef __linux__
  if (alignment == kLargePage) madvise(own.memory, capacity, MADV_HUGEPAGE);
#endif
  own.capacity = capacity;
  return own.memory;
}
