// What the processor can multiply at most: loops of one instruction each, in registers alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ktplan/threads.h"

namespace ktplan {

struct Limit {
  const char* name;     // "vpdpbusd zmm"
  const char* kind;     // of numbers: "int8", "bf16" or "fp32"
  std::string missing;  // empty: it runs here
  void (*run)(std::uint64_t rounds) noexcept;
  std::uint64_t operations;  // multiplications and additions of a round
};

// Every loop of this build.
const std::vector<Limit>& limits();

// Runs `rounds` of a loop in all on the pool's threads, in pieces that any thread takes; returns the operations.
std::uint64_t run_limit(const Limit& limit, std::uint64_t rounds, Pool& pool);

}  // namespace ktplan
