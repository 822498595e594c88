// The shared memory channel with threads for ranks: mixed calls of odd sizes over small slots, every result checked.
//   PLANTED WORLD ROUNDS [DIFFERENT]
// PLANTED numbers a fault that the test has built in, 0 for none. With DIFFERENT the last rank's last call differs, and
// every rank must be told of a mismatch. Exit code 1: a wrong value; 3: a call that failed.

#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "shm_channel.h"

int planted = 0;

namespace {

using namespace megalite;

struct Shape {
  int world, rounds;
  bool different;
};

std::vector<int32_t> numbers(int rank, int round, int64_t count) {
  std::vector<int32_t> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>((i * 7 + rank * 1000 + round * 13) % 100'003);
  return values;
}

int32_t sum_at(const Shape& shape, int round, int64_t i) {
  int64_t sum = 0;
  for (int r = 0; r < shape.world; ++r) sum += (i * 7 + r * 1000 + round * 13) % 100'003;
  return static_cast<int32_t>(sum);
}

void expect(bool good, const char* what, int rank, int round) {
  if (good) return;
  std::fprintf(stderr, "rank %d round %d: wrong %s\n", rank, round, what);
  std::_Exit(1);
}

void succeed(const ShmEnd& end, const char* what, int rank) {
  if (end.state == ShmState::kOk) return;
  std::fprintf(stderr, "rank %d: %s ended with state %d\n", rank, what, static_cast<int>(end.state));
  std::_Exit(3);
}

void one_round(ShmChannel& channel, const Shape& shape, int rank, int round, int64_t count) {
  const int world = shape.world;
  std::vector<int32_t> own = numbers(rank, round, count), piece(count / world);
  const int64_t each = count / world;
  succeed(channel.all_reduce(own.data(), count, Element::kInt32, Reduce::kSum), "all_reduce", rank);
  for (int64_t i = 0; i < count; ++i) expect(own[i] == sum_at(shape, round, i), "all_reduce", rank, round);

  own = numbers(rank, round, count);
  if ((round + rank) % 2 == 0) {
    succeed(channel.reduce_scatter(piece.data(), own.data(), each, Element::kInt32), "reduce_scatter", rank);
  } else {  // in halves, with time for the others in between
    succeed(channel.begin_reduce_scatter(piece.data(), own.data(), each, Element::kInt32), "first half", rank);
    round % 3 == 0 ? sched_yield() : usleep(round % 3 * 50);
    succeed(channel.finish_reduce_scatter(), "second half", rank);
  }
  for (int64_t i = 0; i < each; ++i)
    expect(piece[i] == sum_at(shape, round, rank * each + i), "reduce_scatter", rank, round);

  std::vector<int32_t> gathered(each * world);
  succeed(channel.all_gather(gathered.data(), piece.data(), 4 * each), "all_gather", rank);
  for (int64_t i = 0; i < each * world; ++i)
    expect(gathered[i] == sum_at(shape, round, i), "all_gather", rank, round);

  const int root = round % world;
  own = numbers(rank, round, count);
  succeed(channel.broadcast(own.data(), 4 * count, root), "broadcast", rank);
  expect(own == numbers(root, round, count), "broadcast", rank, round);
}

void run_rank(ShmChannel& channel, const Shape& shape, int rank, std::vector<int32_t>& in_turn) {
  std::mt19937 random(rank), common(7);
  for (int round = 0; round < shape.rounds; ++round) {
    if (random() % 4 == 0) sched_yield();
    if (random() % 8 == 0) usleep(200);
    const int64_t count = round % 5 == 0 ? common() % 7 : common() % 3000;  // also none at all
    one_round(channel, shape, rank, round, count);
    if (round % shape.world == rank) ++in_turn[0];  // barriers alone order these plain accesses
    succeed(channel.barrier(), "barrier", rank);
    expect(in_turn[0] == round + 1, "barrier", rank, round);
    succeed(channel.barrier(), "barrier", rank);
  }
  if (!shape.different) return;
  std::vector<int32_t> data(64 + 64 * (rank == shape.world - 1));
  const ShmEnd end = channel.all_reduce(data.data(), static_cast<int64_t>(data.size()), Element::kInt32, Reduce::kSum);
  expect(end.state == ShmState::kMismatch, "end of a mismatch", rank, shape.rounds);
}

// This process, as which all ranks pass.
ShmProcess this_process() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return {getpid(), std::stoll(field)};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  planted = std::atoi(argv[1]);
  const Shape shape{std::atoi(argv[2]), std::atoi(argv[3]), argc > 4};
  const ShmOptions options{1024, 512, 0xffffff00u, 0};  // the counters wrap after 256 chunks
  const ShmLayout layout{shape.world, options.slot_bytes};
  void* segment = std::aligned_alloc(kLine, (layout.total_bytes() + kLine - 1) / kLine * kLine);
  __builtin_memset(segment, 0, layout.total_bytes());
  std::vector<std::unique_ptr<ShmChannel>> channels;
  const std::vector<ShmProcess> processes(shape.world, this_process());
  for (int r = 0; r < shape.world; ++r)
    channels.push_back(
        std::make_unique<ShmChannel>(segment, r, processes, options, ShmPatience{20, 2, 60.0, nullptr}));
  std::vector<int32_t> in_turn(1);
  std::vector<std::thread> threads;
  for (int r = 0; r < shape.world; ++r)
    threads.emplace_back(run_rank, std::ref(*channels[r]), std::cref(shape), r, std::ref(in_turn));
  for (std::thread& thread : threads) thread.join();
  std::free(segment);
  return 0;
}
