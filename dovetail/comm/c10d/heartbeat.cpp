#include "dovetail/comm/c10d/heartbeat.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "dovetail/base/error.h"

namespace dovetail::comm {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr milliseconds kAnswer{2000};    // longest wait for the thread's answer
constexpr milliseconds kGoodbye{1000};   // and for its end
constexpr milliseconds kStayOpen{3000};  // for which a store is kept for others after a fault

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// What was last read of a rank.
struct Seen {
  std::string beat;            // "COUNT STATE operation"
  Clock::time_point changed;   // when it last differed
  int samples_after_leaving = 0;

  std::string word(int index) const {
    size_t at = 0;
    for (int i = 0; i < index; ++i) {
      at = beat.find(' ', at);
      if (at == std::string::npos) return {};
      ++at;
    }
    return index == 2 ? beat.substr(at) : beat.substr(at, beat.find(' ', at) - at);
  }
  std::string state() const { return word(1); }
  std::string operation() const { return word(2); }
};

}  // namespace

class Heartbeat::Pulse {
 public:
  Pulse(c10::intrusive_ptr<::c10d::Store> store, const Options& options)
      : store_(std::move(store)), options_(options), interval_(interval(options.deadline)), seen_(options.size) {}

  void run();
  std::string describe(int rank);
  Fault report(Fault seen);
  bool begin_wait(const c10::intrusive_ptr<::c10d::Work>& work, int peer);
  void end_wait();
  bool hopeless(int rank) {
    std::lock_guard lock(mutex_);
    return hopeless_locked(rank);
  }
  void stop(std::thread& thread);

  void enter(const Header& operation) {
    std::lock_guard lock(mutex_);
    operation_ = operation;
  }
  void watch(bool on) {
    std::lock_guard lock(mutex_);
    watching_ = on;
  }
  void leaving() {
    std::lock_guard lock(mutex_);
    leaving_ = true;
    poked_ = true;
    wake_.notify_all();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Runs one call to the store without the lock; notes its loss.
  template <class F>
  void with_store(Lock& lock, F&& call);
  void beat(Lock& lock);
  void sample(Lock& lock);
  void send_report(Lock& lock);
  bool hopeless_locked(int peer) const { return first_ || (!leaving_ && seen_[peer].samples_after_leaving >= 3); }
  void stop_wait_if_hopeless();
  void stay_open(Lock& lock);
  void lose_store();
  Fault parse_fault(const std::string& text) const;
  bool silent(int rank) const;
  int first_silent() const;
  int64_t silence_ms(int rank) const;
  std::string describe_locked(int rank) const;

  const c10::intrusive_ptr<::c10d::Store> store_;
  const Options options_;
  const milliseconds interval_;

  std::mutex mutex_;
  std::condition_variable wake_, answered_;
  Header operation_;
  uint64_t count_ = 0, samples_ = 0;
  bool poked_ = false, stop_ = false, ended_ = false, leaving_ = false, store_lost_ = false;
  bool store_slow_ = false;  // a call has hung
  Clock::time_point sampled_{};
  bool want_sample_ = false, watching_ = false;
  Clock::time_point call_since_{};           // of the store call under way
  std::optional<Fault> to_report_, first_;
  std::vector<Seen> seen_;
  c10::intrusive_ptr<::c10d::Work> waiting_;  // the main thread's blocking wait
  int waiting_peer_ = -1;

  friend class Heartbeat;
  std::thread runner_;
};

template <class F>
void Heartbeat::Pulse::with_store(Lock& lock, F&& call) {
  if (store_lost_) return;
  call_since_ = Clock::now();
  lock.unlock();
  bool ok = true;
  try {
    call();
  } catch (const std::exception&) {
    ok = false;
  }
  lock.lock();
  call_since_ = {};
  if (!ok) lose_store();
}

void Heartbeat::Pulse::lose_store() {
  store_lost_ = true;
  if (!first_ && !leaving_ && options_.store_rank >= 0 && options_.store_rank != options_.rank) {
    first_ = Fault{options_.store_rank, fmt::format("rank {}, which holds the store, is gone", options_.store_rank)};
  }
  answered_.notify_all();
}

void Heartbeat::Pulse::beat(Lock& lock) {
  const char* state = first_ ? "failed" : leaving_ ? "left" : "alive";
  const std::string value = fmt::format("{} {} {}", ++count_, state, operation_.describe());
  with_store(lock, [&] { store_->set(beat_key(options_.rank), value); });
}

Fault Heartbeat::Pulse::parse_fault(const std::string& text) const {
  const size_t space = text.find(' ');
  if (space == std::string::npos) return {-1, text};
  return {std::atoi(text.c_str()), text.substr(space + 1)};
}

void Heartbeat::Pulse::sample(Lock& lock) {
  std::vector<std::string> keys;
  for (int r = 0; r < options_.size; ++r) keys.push_back(beat_key(r));
  std::vector<std::vector<uint8_t>> beats;
  std::string fault;
  with_store(lock, [&] {
    beats = store_->multiGet(keys);
    if (store_->check({"fault"})) fault = text_of(store_->get("fault"));
  });
  const auto now = Clock::now();
  for (size_t r = 0; r < beats.size(); ++r) {
    Seen& seen = seen_[r];
    std::string beat = text_of(beats[r]);
    if (beat != seen.beat) {
      seen.beat = std::move(beat);
      seen.changed = now;
    }
    seen.samples_after_leaving = seen.state() == "left" ? seen.samples_after_leaving + 1 : 0;
  }
  if (!fault.empty() && !first_) first_ = parse_fault(fault);
  ++samples_;
  sampled_ = now;
  want_sample_ = false;
  answered_.notify_all();
}

void Heartbeat::Pulse::send_report(Lock& lock) {
  const Fault fault = *to_report_;
  std::string stored;
  with_store(lock, [&] { stored = store_->compareSet("fault", "", fmt::format("{} {}", fault.rank, fault.reason)); });
  if (!stored.empty()) first_ = parse_fault(stored);
  if (!first_) first_ = fault;
  to_report_.reset();
  answered_.notify_all();
}

bool Heartbeat::Pulse::silent(int rank) const {
  return rank != options_.rank && !seen_[rank].beat.empty() && seen_[rank].state() == "alive" &&
         Clock::now() - seen_[rank].changed > 3 * interval_;
}

int Heartbeat::Pulse::first_silent() const {
  for (int r = 0; r < options_.size; ++r) {
    if (silent(r)) return r;
  }
  return -1;
}

int64_t Heartbeat::Pulse::silence_ms(int rank) const {
  return duration_cast<milliseconds>(Clock::now() - seen_[rank].changed).count();
}

// Ends the main thread's wait when it cannot succeed: a fault is known, or its peer has left and nothing of it is on
// the way.
void Heartbeat::Pulse::stop_wait_if_hopeless() {
  if (!waiting_) return;
  if (!hopeless_locked(waiting_peer_)) return;
  try {
    waiting_->abort();
  } catch (const std::exception&) {  // it ends by itself
  }
}

void Heartbeat::Pulse::run() {
  Lock lock(mutex_);
  auto next = Clock::now();
  while (!stop_) {
    if (to_report_) send_report(lock);
    const bool due = Clock::now() >= next;
    if (due || poked_) {
      poked_ = false;
      beat(lock);
    }
    if ((due && (waiting_ || watching_)) || want_sample_) sample(lock);
    stop_wait_if_hopeless();
    if (due) next = Clock::now() + interval_;
    if (stop_ || to_report_ || poked_ || (want_sample_ && !store_lost_)) continue;
    wake_.wait_until(lock, next, [&] { return stop_ || to_report_ || poked_ || (want_sample_ && !store_lost_); });
  }
  if (!first_) leaving_ = true;
  beat(lock);
  if (first_ && options_.store_rank == options_.rank) stay_open(lock);
  ended_ = true;
  answered_.notify_all();
}

// Others may still be on their way to read the fault; those who are silent or at fault will not come.
void Heartbeat::Pulse::stay_open(Lock& lock) {
  const auto until = Clock::now() + std::min(kStayOpen, options_.deadline);
  while (Clock::now() < until && !store_lost_) {
    sample(lock);
    bool all = true;
    for (int r = 0; r < options_.size; ++r) {
      all = all && (r == options_.rank || r == first_->rank || seen_[r].state() != "alive" || silent(r));
    }
    if (all) return;
    wake_.wait_for(lock, milliseconds(20));
  }
}

std::string Heartbeat::Pulse::describe_locked(int rank) const {
  const Seen& seen = seen_[rank];
  if (seen.beat.empty()) return {};
  const std::string last = fmt::format("last seen in {}", seen.operation());
  if (silent(rank)) return fmt::format("no heartbeat for {} ms, {}", silence_ms(rank), last);
  // Not "alive": it may have been killed since.
  if (seen.state() == "alive") return fmt::format("heartbeat {} ms ago, {}", silence_ms(rank), last);
  return fmt::format("{}, {}", seen.state(), last);
}

std::string Heartbeat::Pulse::describe(int rank) {
  Lock lock(mutex_);
  const bool recent = Clock::now() - sampled_ < interval_ / 2;
  if (!recent && !store_lost_ && !store_slow_) {
    const uint64_t before = samples_;
    want_sample_ = true;
    wake_.notify_all();
    store_slow_ = !answered_.wait_for(lock, std::min(kAnswer / 4, options_.deadline),
                                      [&] { return samples_ != before || store_lost_; });
  }
  return describe_locked(rank);
}

Fault Heartbeat::Pulse::report(Fault seen) {
  Lock lock(mutex_);
  if (first_) return *first_;
  if (seen.rank < 0) {
    watching_ = true;
    answered_.wait_for(lock, 4 * interval_, [&] { return first_ || store_lost_ || first_silent() >= 0; });
    watching_ = false;
    if (first_) return *first_;
  }
  // A rank that waits for a dead one is not at fault.
  if (seen.rank != options_.rank && (seen.rank < 0 || !silent(seen.rank))) {
    if (const int r = first_silent(); r >= 0) {
      seen = {r, fmt::format("rank {} has sent no heartbeat for {} ms, last seen in {}", r, silence_ms(r),
                             seen_[r].operation())};
    }
  }
  const bool in_call = call_since_ != Clock::time_point{};
  const bool hangs = in_call && (store_slow_ || Clock::now() - call_since_ > 2 * interval_);
  if (hangs && options_.store_rank >= 0 && seen.rank != options_.rank) {
    first_ = Fault{options_.store_rank,
                   fmt::format("rank {}, which holds the store, does not answer", options_.store_rank)};
    return *first_;
  }
  to_report_ = seen;
  wake_.notify_all();
  answered_.wait_for(lock, std::min(kAnswer, options_.deadline), [&] { return first_.has_value(); });
  if (!first_) first_ = seen;
  return *first_;
}

bool Heartbeat::Pulse::begin_wait(const c10::intrusive_ptr<::c10d::Work>& work, int peer) {
  std::lock_guard lock(mutex_);
  if (first_) return false;
  waiting_ = work;
  waiting_peer_ = peer;
  return true;
}

void Heartbeat::Pulse::end_wait() {
  std::lock_guard lock(mutex_);
  waiting_.reset();
}

void Heartbeat::Pulse::stop(std::thread& thread) {
  bool ended = false;
  {
    Lock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
    const auto limit = first_ && options_.store_rank == options_.rank ? kStayOpen + kGoodbye : kGoodbye;
    ended = answered_.wait_for(lock, limit, [&] { return ended_; });
  }
  if (ended) {
    thread.join();
  } else {
    thread.detach();  // it hangs in the store and shares all it needs
  }
}

milliseconds Heartbeat::interval(milliseconds deadline) {
  return std::clamp(deadline / 8, milliseconds(200), milliseconds(2000));
}

Heartbeat::Heartbeat(c10::intrusive_ptr<::c10d::Store> store, const Options& options)
    : pulse_(std::make_shared<Pulse>(std::move(store), options)) {
  pulse_->runner_ = std::thread([pulse = pulse_] { pulse->run(); });
}

Heartbeat::~Heartbeat() { pulse_->stop(pulse_->runner_); }

void Heartbeat::enter(const Header& operation) { pulse_->enter(operation); }
std::string Heartbeat::describe(int rank) { return pulse_->describe(rank); }
void Heartbeat::watch(bool on) { pulse_->watch(on); }
void Heartbeat::leaving() { pulse_->leaving(); }
void Heartbeat::end_wait() { pulse_->end_wait(); }
bool Heartbeat::hopeless(int rank) { return pulse_->hopeless(rank); }
bool Heartbeat::begin_wait(const c10::intrusive_ptr<::c10d::Work>& work, int peer) {
  return pulse_->begin_wait(work, peer);
}

Fault Heartbeat::report(const Fault& seen) noexcept {
  try {
    return pulse_->report(seen);
  } catch (const std::exception&) {
    return seen;
  }
}

}  // namespace dovetail::comm
