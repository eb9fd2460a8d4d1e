// The device's memory: which addresses are allocated, and what freed ones were.
#pragma once

#include <cstdint>
#include <string>

namespace ptxemu {

constexpr uint64_t kDeviceBytes = 16ull << 30;

// Allocates `bytes` bytes at a multiple of 256, filled with poison, between inaccessible pages.
// Null if the device has no room.
void* allocate(uint64_t bytes, const char* what);
// Returns false if no allocation begins there. The addresses are not reused for a while, so that
// later accesses are detected.
bool release(void* pointer);
void register_memory(uint64_t low, uint64_t bytes, const char* what);
void unregister_memory(uint64_t low);

// Whether all of the bytes belong to one allocation.
bool allocated(uint64_t address, uint64_t bytes, uint64_t* low = nullptr, uint64_t* high = nullptr);
// Describes what is at or nearest to an address, for reports.
std::string describe_address(uint64_t address);
// The unique number of the allocation that begins there; 0 if there is none.
uint64_t allocation_number(uint64_t low);
uint64_t allocated_bytes();

}  // namespace ptxemu
