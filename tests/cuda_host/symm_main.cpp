// The symmetric collectives' .cu files on host threads. As a library: one function for a rank of any process. As a program:
// all ranks in this process, one thread each, several calls in a row with fresh data and random delays.
//   LINE FAULT OP RANKS FORMAT NUM OFFSET CALLS EPOCH JITTER_US FOLDER
// FOLDER/in is (calls, ranks, elements of a rank's input) in the format, FOLDER/out the same of outputs; OFFSET shifts both
// by elements, so that they are not aligned. LINE is that of a barrier to leave out.

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "symm_all_reduce.cu"
#include "symm_barrier.cu"
#include "symm_gather.cu"
#include "symm_multimem.cu"
#include "symm_scatter.cu"

namespace megalite {

template <int kFormat>
uint4 multimem_sum(const char* base, int64_t offset) {
  using Form = Numbers<kFormat>;
  const auto* all = reinterpret_cast<const emulator::Multicast*>(base);
  float sum[Form::kLanes], next[Form::kLanes];
  Form::unpack(*reinterpret_cast<const uint4*>(all->bases[0] + offset), sum);
  for (int i = 1; i < all->size; ++i) {
    Form::unpack(*reinterpret_cast<const uint4*>(all->bases[i] + offset), next);
    for (int lane = 0; lane < Form::kLanes; ++lane) sum[lane] += next[lane];
  }
  return Form::pack(sum);
}

}  // namespace megalite

enum Op { kOneShot, kTwoShot, kMultimem, kGather, kScatter, kBroadcast, kBarrier };

extern "C" {

// num counts what the header's function of this op counts; argument is its reduction or root.
int symm_call(int op, const megalite::SymmTeam* team, const void* x, void* out, int64_t num, int format, int argument) {
  switch (op) {
    case kOneShot:
      return megalite::symm_all_reduce_one_shot(*team, x, out, num, format, argument, nullptr);
    case kTwoShot:
      return megalite::symm_all_reduce_two_shot(*team, x, out, num, format, argument, nullptr);
    case kMultimem:
      return megalite::symm_all_reduce_multimem(*team, x, out, num, format, nullptr);
    case kGather:
      return megalite::symm_all_gather(*team, x, out, num, format, nullptr);
    case kScatter:
      return megalite::symm_reduce_scatter(*team, x, out, num, format, nullptr);
    case kBroadcast:
      return megalite::symm_broadcast(*team, out, num, argument, format, nullptr);
    default:
      return megalite::symm_barrier(*team, nullptr);
  }
}

// Once per process, before the first call.
void symm_set_up(int jitter_us) {
  emulator::resident = true;
  emulator::jitter_us = jitter_us;
}

int symm_flag_columns() { return megalite::kFlagColumns; }

// Lives as long as the process.
megalite::SymmTeam* symm_new_team(int rank, int size, int row_flags, int64_t buffer_bytes, double timeout_s,
                                  int64_t error, const int64_t* buffers, const int64_t* multicast, const int64_t* flags) {
  return new megalite::SymmTeam(
      megalite::make_team(rank, size, row_flags, buffer_bytes, timeout_s, error, buffers, multicast, flags));
}
}

namespace {

struct Job {
  Op op;
  int ranks, format;
  int64_t num, offset, calls;
  uint32_t epoch;
  std::string folder;

  size_t width() const { return format == megalite::kFp32 ? 4 : 2; }
  int64_t inputs() const { return op == kScatter ? num * ranks : num; }
  int64_t outputs() const { return op == kGather ? num * ranks : num; }
};

// One rank's memory.
struct Rank {
  std::vector<uint4> buffers[2];
  std::vector<uint32_t> flags, error;
};

constexpr int64_t kBufferBytes = 1 << 11;

std::vector<Rank> make_ranks(const Job& job) {
  std::vector<Rank> ranks(static_cast<size_t>(job.ranks));
  for (Rank& rank : ranks) {
    for (auto& buffer : rank.buffers) buffer.resize(kBufferBytes / sizeof(uint4), {~0u, ~0u, ~0u, ~0u});
    rank.flags.resize(static_cast<size_t>(job.ranks * megalite::kFlagColumns), job.epoch);
    for (int r = 0; r < job.ranks; ++r) rank.flags[static_cast<size_t>(r * megalite::kFlagColumns + megalite::kFailedColumn)] = 0;
    rank.error.resize(megalite::kErrorWords);
  }
  return ranks;
}

megalite::SymmTeam make_team(std::vector<Rank>& ranks, int rank, emulator::Multicast* multicast) {
  megalite::SymmTeam team{};
  team.rank = rank;
  team.size = static_cast<int>(ranks.size());
  team.row_flags = megalite::kFlagColumns;
  team.buffer_bytes = kBufferBytes;
  team.timeout_ns = emulator::fault ? 1'000'000'000 : 30'000'000'000;
  team.error = ranks[static_cast<size_t>(rank)].error.data();
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (int b = 0; b < 2; ++b) team.buffers[b][r] = reinterpret_cast<char*>(ranks[r].buffers[b].data());
    team.flags[r] = ranks[r].flags.data();
  }
  for (int b = 0; b < 2; ++b) team.multicast[b] = reinterpret_cast<char*>(&multicast[b]);
  return team;
}

int run_rank(const Job& job, const megalite::SymmTeam& team, std::vector<char>& in, std::vector<char>& out) {
  const size_t width = job.width();
  const auto rank = static_cast<size_t>(team.rank), ranks = static_cast<size_t>(job.ranks);
  int error = 0;
  for (size_t call = 0; call < static_cast<size_t>(job.calls); ++call) {
    emulator::jitter();
    const size_t index = call * ranks + rank, shift = static_cast<size_t>(job.offset) * width;
    const size_t in_bytes = static_cast<size_t>(job.inputs()) * width, out_bytes = static_cast<size_t>(job.outputs()) * width;
    std::vector<uint4> x(in_bytes / 16 + 2), y(out_bytes / 16 + 2);
    char* from = reinterpret_cast<char*>(x.data()) + shift;
    char* to = reinterpret_cast<char*>(y.data()) + shift;
    std::memcpy(from, in.data() + index * in_bytes, in_bytes);
    if (job.op == kBroadcast) std::memcpy(to, from, in_bytes);
    const int argument = job.op == kBroadcast ? static_cast<int>(call) % job.ranks : megalite::kSum;
    error = std::max(error, symm_call(job.op, &team, from, to, job.num, job.format, argument));
    std::memcpy(out.data() + index * out_bytes, to, out_bytes);
  }
  return error;
}

int run_job(const Job& job) {
  std::vector<Rank> ranks = make_ranks(job);
  emulator::Multicast multicast[2];
  for (int b = 0; b < 2; ++b) {
    multicast[b].size = job.ranks;
    for (size_t r = 0; r < ranks.size(); ++r) multicast[b].bases[r] = reinterpret_cast<char*>(ranks[r].buffers[b].data());
  }
  const size_t elements = static_cast<size_t>(job.calls * job.ranks) * job.width();
  std::vector<char> in(elements * static_cast<size_t>(job.inputs())), out(elements * static_cast<size_t>(job.outputs()));
  std::ifstream(job.folder + "/in", std::ios::binary).read(in.data(), static_cast<std::streamsize>(in.size()));
  std::vector<std::thread> running;
  std::vector<int> errors(ranks.size());
  for (int rank = 0; rank < job.ranks; ++rank) {
    running.emplace_back([&, rank] {
      errors[static_cast<size_t>(rank)] = run_rank(job, make_team(ranks, rank, multicast), in, out);
    });
  }
  for (std::thread& one : running) one.join();
  std::ofstream(job.folder + "/out", std::ios::binary).write(out.data(), static_cast<std::streamsize>(out.size()));
  for (int rank = 0; rank < job.ranks; ++rank) {
    const auto& error = ranks[static_cast<size_t>(rank)].error;
    if (errors[static_cast<size_t>(rank)]) return 3;
    if (error[megalite::kErrorState]) {
      std::cerr << "rank " << error[megalite::kErrorRank] << " waited for " << error[megalite::kErrorPeer] << "\n";
      return 4;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 12) return 2;
  emulator::dropped_line = std::atoi(argv[1]);
  emulator::fault = std::atoi(argv[2]);
  const Job job{static_cast<Op>(std::atoi(argv[3])),
                std::atoi(argv[4]),
                std::atoi(argv[5]),
                std::atoll(argv[6]),
                std::atoll(argv[7]),
                std::atoll(argv[8]),
                static_cast<uint32_t>(std::strtoul(argv[9], nullptr, 10)),
                argv[11]};
  symm_set_up(std::atoi(argv[10]));
  return run_job(job);
}
