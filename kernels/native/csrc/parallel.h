// Threads and scratch memory. Compiled once, without any instruction set, and used by every build of the kernels.
#pragma once
#include <cstddef>
#include <cstdint>

// Calls body(context, item) once for each item below num_items, on up to num_threads threads.
void ft_parallel_for(int64_t num_items, int num_threads, void (*body)(void*, int64_t), void* context);

// Memory of the calling thread that lives until its next call with the same slot; null if there is none.
// Grows and never shrinks, because a layer follows the layer before it.
void* ft_scratch(int slot, size_t num_bytes);

constexpr int FT_SCRATCH_CALL = 0;    // of the thread that called the kernel
constexpr int FT_SCRATCH_WORKER = 1;  // of the thread that works on an item
constexpr int FT_SCRATCH_ITEMS = 2;   // lists that the calling thread makes

namespace {
template <class Body>
void parallel_for(int64_t num_items, int num_threads, Body& body) {
  ft_parallel_for(
      num_items, num_threads, [](void* context, int64_t item) { (*static_cast<Body*>(context))(item); }, &body);
}
}  // namespace
