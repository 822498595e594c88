// Collectives over a shared segment: see shm_channel.h, and [Note: chunks and flags] in shm_layout.h.
//
// Each chunk is published (copied into the own slot) one chunk ahead of its use, so that ranks need not run in step. No
// rank copies what no other rank reads, and sums are made from the slots straight into the result.

#include "shm_channel.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace megalite {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t chunks_for(int64_t whole, int64_t part) { return std::max<int64_t>(1, divide_up(whole, part)); }

bool failed(const ShmEnd& end) { return end.state != ShmState::kOk; }

void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

ShmChannel::ShmChannel(void* segment, int rank, std::vector<ShmProcess> processes, const ShmOptions& options,
                       ShmPatience patience)
    : layout_{static_cast<int>(processes.size()), options.slot_bytes},
      rank_(rank),
      base_(static_cast<Bytes*>(segment)),
      header_(reinterpret_cast<ShmHeader*>(base_)),
      ranks_(reinterpret_cast<ShmRank*>(base_ + layout_.ranks_at())),
      processes_(std::move(processes)),
      options_(options),
      patience_(std::move(patience)),
      chunks_(options.first_chunk) {
  for (ShmFlag ShmRank::*flag : {&ShmRank::done, &ShmRank::taken, &ShmRank::ready}) post(flag, chunks_);
}

ShmEnd ShmChannel::barrier() {
  return run({ShmKind::kBarrier, 0, 0, 0, 0}, 1, [](int64_t, uint32_t) {}, [](int64_t, uint32_t) {});
}

ShmEnd ShmChannel::all_reduce(void* data, int64_t count, Element element, Reduce reduce) {
  Bytes* bytes = static_cast<Bytes*>(data);
  const bool small = count * element_bytes(element) <= options_.one_shot_max;
  return small ? one_shot(bytes, count, element, reduce) : two_shot(bytes, count, element, reduce);
}

// Everyone publishes everything and sums everything.
ShmEnd ShmChannel::one_shot(Bytes* data, int64_t count, Element element, Reduce reduce) {
  const int64_t item = element_bytes(element), total = count * item, part = layout_.slot_bytes;
  const ReduceLoop loop = reduce_loop(element, reduce, options_.simd);
  const Call call{ShmKind::kAllReduce, static_cast<int>(element), static_cast<int>(reduce), 0, count};
  std::vector<const void*> sources(layout_.size);
  const auto bytes_of = [&](int64_t c) { return std::min(part, total - c * part); };
  return run(
      call, chunks_for(total, part),
      [&](int64_t c, uint32_t chunk) { copy(slot(rank_, chunk), data + c * part, bytes_of(c)); },
      [&](int64_t c, uint32_t chunk) {
        for (int r = 0; r < layout_.size; ++r) sources[r] = r == rank_ ? data + c * part : slot(r, chunk);
        loop(sources.data(), layout_.size, data + c * part, nullptr, bytes_of(c) / item);
      });
}

// Rank r sums piece r of every chunk and shows the others the result.
ShmEnd ShmChannel::two_shot(Bytes* data, int64_t count, Element element, Reduce reduce) {
  const int64_t item = element_bytes(element), total = count * item, part = layout_.slot_bytes;
  const ReduceLoop loop = reduce_loop(element, reduce, options_.simd);
  const Call call{ShmKind::kAllReduce, static_cast<int>(element), static_cast<int>(reduce), 0, count};
  const int64_t num_chunks = chunks_for(total, part);
  std::vector<const void*> sources(layout_.size);
  const auto piece = [&](int64_t c, int r) {  // of rank r, within chunk c; whole cache lines but for the end
    const int64_t bytes = std::min(part, total - c * part);
    const int64_t each = divide_up(divide_up(bytes, layout_.size), 64) * 64, at = std::min(bytes, r * each);
    return Part{at, std::min(each, bytes - at)};
  };
  ShmEnd end = begin(call);
  if (failed(end)) return end;
  const auto publish = [&](int64_t c) {
    const uint32_t chunk = chunks_ + static_cast<uint32_t>(c);
    if (failed(end = await(&ShmRank::taken, chunk - 1))) return false;
    const int64_t bytes = std::min(part, total - c * part);
    const Part own = piece(c, rank_);
    const int64_t after = own.at + own.bytes;
    copy(slot(rank_, chunk), data + c * part, own.at);
    copy(slot(rank_, chunk) + after, data + c * part + after, bytes - after);
    post(&ShmRank::ready, chunk + 1);
    return true;
  };
  const auto sum = [&](int64_t c) {
    const uint32_t chunk = chunks_ + static_cast<uint32_t>(c);
    if (failed(end = await(&ShmRank::ready, chunk + 1))) return false;
    if (c == 0 && failed(end = compare(call))) return false;
    if (failed(end = await(&ShmRank::done, chunk - 1))) return false;
    const Part own = piece(c, rank_);
    Bytes* target = data + c * part + own.at;
    for (int r = 0; r < layout_.size; ++r) sources[r] = r == rank_ ? target : slot(r, chunk) + own.at;
    loop(sources.data(), layout_.size, target, result(rank_, chunk), own.bytes / item);
    post(&ShmRank::taken, chunk + 1);
    return true;
  };
  const auto finish = [&](int64_t c) {
    const uint32_t chunk = chunks_ + static_cast<uint32_t>(c);
    if (failed(end = await(&ShmRank::taken, chunk + 1))) return false;
    for (int i = 1; i < layout_.size; ++i) {
      const int r = (rank_ + i) % layout_.size;
      const Part theirs = piece(c, r);
      copy(data + c * part + theirs.at, result(r, chunk), theirs.bytes);
    }
    post(&ShmRank::done, chunk + 1);
    return true;
  };
  if (!publish(0)) return end;
  for (int64_t c = 0; c < num_chunks; ++c) {
    if (c + 1 < num_chunks && !publish(c + 1)) return end;
    if (!sum(c) || (c > 0 && !finish(c - 1))) return end;
  }
  if (!finish(num_chunks - 1)) return end;
  chunks_ += static_cast<uint32_t>(num_chunks);
  ++calls_;
  return end;
}

ShmEnd ShmChannel::reduce_scatter(void* out, const void* full, int64_t count, Element element) {
  const ShmEnd end = begin_reduce_scatter(out, full, count, element);
  return failed(end) ? end : finish_reduce_scatter();
}

ShmEnd ShmChannel::begin_reduce_scatter(void* out, const void* full, int64_t count, Element element) {
  const int64_t each = count * element_bytes(element);
  const int64_t part = std::max<int64_t>(64, layout_.slot_bytes / layout_.size / 64 * 64);
  const Call call{ShmKind::kReduceScatter, static_cast<int>(element), 0, 0, count};
  const int64_t num_chunks = chunks_for(each, part);
  Scatter scatter{call, static_cast<Bytes*>(out), static_cast<const Bytes*>(full), each, part, num_chunks, 0};
  const ShmEnd end = begin(call);
  if (failed(end)) return end;
  const auto publish = [&](int64_t c, uint32_t chunk) { publish_scatter(scatter, c, chunk); };
  scatter.published = publish_free(num_chunks, publish);
  begun_ = scatter;
  return end;
}

ShmEnd ShmChannel::finish_reduce_scatter() {
  if (!begun_) throw std::logic_error("no reduce_scatter has begun");
  const Scatter scatter = *std::exchange(begun_, std::nullopt);
  if (!failure().empty()) return {ShmState::kFailed, {}};
  const Element element = static_cast<Element>(scatter.call.element);
  const ReduceLoop loop = reduce_loop(element, Reduce::kSum, options_.simd);
  std::vector<const void*> sources(layout_.size);
  return finish(
      scatter.call, scatter.num_chunks, scatter.published,
      [&](int64_t c, uint32_t chunk) { publish_scatter(scatter, c, chunk); },
      [&](int64_t c, uint32_t chunk) {
        const int64_t at = c * scatter.part, bytes = std::min(scatter.part, scatter.each - at);
        for (int r = 0; r < layout_.size; ++r)
          sources[r] = r == rank_ ? scatter.full + rank_ * scatter.each + at : slot(r, chunk) + rank_ * scatter.part;
        loop(sources.data(), layout_.size, scatter.out + at, nullptr, bytes / element_bytes(element));
      });
}

// The others' pieces of chunk c.
void ShmChannel::publish_scatter(const Scatter& scatter, int64_t c, uint32_t chunk) const {
  const int64_t at = c * scatter.part, bytes = std::min(scatter.part, scatter.each - at);
  for (int r = 0; r < layout_.size; ++r) {
    if (r != rank_) copy(slot(rank_, chunk) + r * scatter.part, scatter.full + r * scatter.each + at, bytes);
  }
}

ShmEnd ShmChannel::all_gather(void* out, const void* shard, int64_t bytes) {
  const int64_t part = layout_.slot_bytes;
  Bytes* target = static_cast<Bytes*>(out);
  const Bytes* source = static_cast<const Bytes*>(shard);
  const auto bytes_of = [&](int64_t c) { return std::min(part, bytes - c * part); };
  return run(
      {ShmKind::kAllGather, 0, 0, 0, bytes}, chunks_for(bytes, part),
      [&](int64_t c, uint32_t chunk) {
        copy(slot(rank_, chunk), source + c * part, bytes_of(c));
        copy(target + rank_ * bytes + c * part, source + c * part, bytes_of(c));
      },
      [&](int64_t c, uint32_t chunk) {
        for (int i = 1; i < layout_.size; ++i) {
          const int r = (rank_ + i) % layout_.size;
          copy(target + r * bytes + c * part, slot(r, chunk), bytes_of(c));
        }
      });
}

ShmEnd ShmChannel::broadcast(void* data, int64_t bytes, int root) {
  const int64_t part = layout_.slot_bytes;
  Bytes* target = static_cast<Bytes*>(data);
  const auto bytes_of = [&](int64_t c) { return std::min(part, bytes - c * part); };
  return run(
      {ShmKind::kBroadcast, 0, 0, root, bytes}, chunks_for(bytes, part),
      [&](int64_t c, uint32_t chunk) {
        if (rank_ == root) copy(slot(root, chunk), target + c * part, bytes_of(c));
      },
      [&](int64_t c, uint32_t chunk) {
        if (rank_ != root) copy(target + c * part, slot(root, chunk), bytes_of(c));
      });
}

// A call whose chunks are published into slots and taken from them; there are no results to show.
template <typename Publish, typename Take>
ShmEnd ShmChannel::run(const Call& call, int64_t num_chunks, const Publish& publish, const Take& take) {
  const ShmEnd end = begin(call);
  return failed(end) ? end : finish(call, num_chunks, publish_free(num_chunks, publish), publish, take);
}

// The first half: publishes into the slots that are free now, and says how many chunks that were. Waits for nothing.
template <typename Publish>
int64_t ShmChannel::publish_free(int64_t num_chunks, const Publish& publish) {
  int64_t c = 0;
  for (; c < std::min<int64_t>(num_chunks, 2); ++c) {
    const uint32_t chunk = chunks_ + static_cast<uint32_t>(c);
    if (!reached(&ShmRank::taken, chunk - 1)) break;
    publish(c, chunk);
    post(&ShmRank::ready, chunk + 1);
  }
  return c;
}

// The second half, with `published` chunks in the slots.
template <typename Publish, typename Take>
ShmEnd ShmChannel::finish(const Call& call, int64_t num_chunks, int64_t published, const Publish& publish,
                          const Take& take) {
  ShmEnd end;
  for (int64_t c = 0; c <= num_chunks; ++c) {
    const uint32_t chunk = chunks_ + static_cast<uint32_t>(c);
    if (c >= published && c < num_chunks) {
      if (failed(end = await(&ShmRank::taken, chunk - 1))) return end;
      publish(c, chunk);
      post(&ShmRank::ready, chunk + 1);
    }
    if (c == 0) continue;
    if (failed(end = await(&ShmRank::ready, chunk))) return end;
    if (c == 1 && failed(end = compare(call))) return end;
    take(c - 1, chunk - 1);
    post(&ShmRank::taken, chunk);
  }
  chunks_ += static_cast<uint32_t>(num_chunks);
  post(&ShmRank::done, chunks_);
  ++calls_;
  return end;
}

ShmEnd ShmChannel::begin(const Call& call) {
  if (!failure().empty()) return {ShmState::kFailed, {}};
  if (begun_) return {ShmState::kUnfinished, {}};
  *call_of(rank_) = {calls_, static_cast<int>(call.kind), call.element, call.reduce, call.root, call.count};
  return {};
}

// Whether all others have got there; one look.
bool ShmChannel::reached(ShmFlag ShmRank::*flag, uint32_t value) const {
  for (int r = 0; r < layout_.size; ++r) {
    if (r != rank_ && !shm_reached(shm_look(&(ranks_[r].*flag)), value)) return false;
  }
  return true;
}

ShmEnd ShmChannel::await(ShmFlag ShmRank::*flag, uint32_t value) const {
  const ShmGroup group{header_, ranks_, &processes_, rank_};
  const ShmGoal goal{flag, value};
  for (int i = 1; i < layout_.size; ++i) {
    const ShmState state = shm_wait(group, (rank_ + i) % layout_.size, goal, patience_);
    if (state != ShmState::kOk) return give_up(group, goal, state);
  }
  return {};
}

// Whom the failed wait is about: the dead, or all that did not come.
ShmEnd ShmChannel::give_up(const ShmGroup& group, const ShmGoal& goal, ShmState state) const {
  ShmEnd end{state, {}};
  for (int r = 0; r < layout_.size; ++r) {
    const bool missing = state == ShmState::kDead ? shm_died_before(group, r, goal) : !shm_reached(group, r, goal);
    if (r != rank_ && missing) end.ranks.push_back(r);
  }
  return end;
}

// Whether all ranks call the same; after their first `ready` of this call.
ShmEnd ShmChannel::compare(const Call& call) const {
  ShmEnd end;
  for (int r = 0; r < layout_.size; ++r) {
    const ShmCall& theirs = *call_of(r);
    const bool same = theirs.number == calls_ && theirs.kind == static_cast<int>(call.kind) &&
                      theirs.element == call.element && theirs.reduce == call.reduce && theirs.root == call.root &&
                      theirs.count == call.count;
    if (!same) end.ranks.push_back(r);
  }
  if (!end.ranks.empty()) end.state = ShmState::kMismatch;
  return end;
}

void ShmChannel::fail(const std::string& text) {
  uint32_t none = 0;
  if (!__atomic_compare_exchange_n(&header_->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
  const size_t bytes = std::min<size_t>(text.size(), kTextBytes - 1);
  std::memcpy(header_->text, text.data(), bytes);
  header_->text[bytes] = 0;
  __atomic_store_n(&header_->failed, 2, __ATOMIC_RELEASE);
}

std::string ShmChannel::failure() const {
  return __atomic_load_n(&header_->failed, __ATOMIC_ACQUIRE) == 2 ? header_->text : "";
}

}  // namespace megalite
