// The core, line by line what simulate/engine.py does: same order, same arithmetic, same ties.
#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <unordered_map>

#include "program.hpp"

namespace kosmos {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Running {
    double end;
    std::int64_t serial;
    int wg, queue, item;
};

struct Timer {
    double at;
    std::int64_t serial;
    int rank, wg, low, high;
};

struct Waiter {
    int rank, wg, queue, item;
};

// Orders the heaps of <algorithm>, which keep the largest in front.
template <typename T>
bool later(const T& a, const T& b);
template <>
bool later(const Running& a, const Running& b) {
    return std::tie(a.end, a.serial) > std::tie(b.end, b.serial);
}
template <>
bool later(const Timer& a, const Timer& b) {
    return std::tie(a.at, a.serial) > std::tie(b.at, b.serial);
}

template <typename T>
void push(std::vector<T>& heap, const T& item) {
    heap.push_back(item);
    std::push_heap(heap.begin(), heap.end(), later<T>);
}

template <typename T>
T pop(std::vector<T>& heap) {
    std::pop_heap(heap.begin(), heap.end(), later<T>);
    T item = heap.back();
    heap.pop_back();
    return item;
}

struct Workgroup {
    int role = kGone;
    int reserved = -1;
    int stolen = 0;
    bool turn = false;
    double claimed = 0.0, started = 0.0;
};

class Engine {
  public:
    Engine(const Program& program, bool trace)
        : p_(program),
          trace_(trace),
          num_ranks_(static_cast<int>(program.ranks.size())),
          counters_(program.counters),
          clock_(program.ranks.size() + program.flows.size(), 0.0),
          rate_(clock_.size(), 0.0),
          active_(clock_.size()),
          sharing_(program.groups, 0),
          moving_(program.ranks.size(), 0),
          joined_(program.ranks.size(), 0),
          heads_(program.ranks.size(), std::vector<int>(kNumQueues, 0)) {
        played_.end.assign(p_.ranks.size(), 0.0);
        played_.busy.assign(p_.ranks.size(), std::vector<double>(kNumQueues, 0.0));
        played_.wait = played_.busy;
        for (const Rank& rank : p_.ranks) {
            wgs_.emplace_back(rank.roles.size());
            for (std::size_t wg = 0; wg < rank.roles.size(); ++wg)
                wgs_.back()[wg].role = rank.roles[wg];
        }
    }

    Played run() {
        for (int rank = 0; rank < num_ranks_; ++rank)
            for (std::size_t wg = 0; wg < p_.ranks[rank].starts.size(); ++wg)
                timer(p_.ranks[rank].starts[wg], rank, static_cast<int>(wg), -1, 0);
        while (true) {
            double best = timers_.empty() ? kInfinity : timers_.front().at;
            int which = -1;
            for (std::size_t i = 0; i < active_.size(); ++i) {
                if (active_[i].empty()) continue;
                const double left = (active_[i].front().end - clock_[i]) / rate_[i];
                const double at = now_ + (left > 0.0 ? left : 0.0);
                if (at < best) {
                    best = at;
                    which = static_cast<int>(i);
                }
            }
            if (best == kInfinity) break;
            ++played_.events;
            advance(best);
            if (which < 0)
                fire();
            else
                finish(which);
            share();
        }
        check_done();
        return std::move(played_);
    }

  private:
    void advance(double to) {
        const double step = to - now_;
        for (std::size_t i = 0; i < active_.size(); ++i)
            if (!active_[i].empty()) clock_[i] += rate_[i] * step;
        now_ = to;
    }

    void timer(double at, int rank, int wg, int low, int high) {
        push(timers_, Timer{at, serial_++, rank, wg, low, high});
    }

    void fire() {
        const Timer t = pop(timers_);
        if (t.low < 0)
            next(t.rank, t.wg);
        else
            signal(t.low, t.high);
    }

    void finish(int resource) {
        const Running done = pop(active_[resource]);
        clock_[resource] = done.end;
        int rank = resource;
        if (resource >= num_ranks_) {
            const Flow& flow = p_.flows[resource - num_ranks_];
            rank = flow.rank;
            --moving_[rank];
            --sharing_[flow.send_group];
            if (flow.receive_group >= 0) --sharing_[flow.receive_group];
        }
        Workgroup& wg = wgs_[rank][done.wg];
        played_.busy[rank][done.queue] += now_ - wg.started;
        played_.end[rank] = now_;
        if (trace_)
            played_.spans.push_back(
                {rank, done.wg, done.queue, done.item, wg.claimed, wg.started, now_});
        const Queue& items = p_.ranks[rank].queues[done.queue];
        const int low = items.sig_lo[done.item], high = items.sig_hi[done.item];
        if (low < high) {
            if (p_.flag_us > 0.0)
                timer(now_ + p_.flag_us, rank, done.wg, low, high);
            else
                signal(low, high);
        }
        if (items.then[done.item] >= 0) {
            wg.claimed = now_;
            start_or_wait(rank, done.wg, done.queue, items.then[done.item]);
        } else {
            next(rank, done.wg);
        }
    }

    void signal(int low, int high) {
        for (int counter = low; counter < high; ++counter) {
            if (--counters_[counter] != 0) continue;
            const auto found = waiters_.find(counter);
            if (found == waiters_.end()) continue;
            const std::vector<Waiter> woken = std::move(found->second);
            waiters_.erase(found);
            for (const Waiter& w : woken) start_or_wait(w.rank, w.wg, w.queue, w.item);
        }
    }

    void share() {
        for (int rank = 0; rank < num_ranks_; ++rank)
            rate_[rank] = p_.build_rate[active_[rank].size()] * p_.build_drag[moving_[rank]];
        for (std::size_t i = 0; i < p_.flows.size(); ++i) {
            if (active_[num_ranks_ + i].empty()) continue;
            const Flow& flow = p_.flows[i];
            double rate = p_.tables[flow.send_table][sharing_[flow.send_group]];
            if (flow.receive_group >= 0)
                rate = std::min(rate, p_.tables[flow.receive_table][sharing_[flow.receive_group]]);
            rate_[num_ranks_ + i] = rate * p_.move_drag[active_[flow.rank].size()];
        }
    }

    int held_by(int rank, int queue, int item) const {
        const Queue& items = p_.ranks[rank].queues[queue];
        for (int counter = items.need_lo[item]; counter < items.need_hi[item]; ++counter)
            if (counters_[counter] > 0) return counter;
        return -1;
    }

    void take(int rank, int wg, int queue) {
        const int item = heads_[rank][queue]++;
        wgs_[rank][wg].claimed = now_;
        start_or_wait(rank, wg, queue, item);
    }

    void start_or_wait(int rank, int wg, int queue, int item) {
        const int counter = held_by(rank, queue, item);
        if (counter >= 0) {
            waiters_[counter].push_back({rank, wg, queue, item});
            return;
        }
        Workgroup& self = wgs_[rank][wg];
        played_.wait[rank][queue] += now_ - self.claimed;
        self.started = now_;
        const Queue& items = p_.ranks[rank].queues[queue];
        int resource = rank;
        const int index = queue == kTiles ? items.flow[item] - 1 : items.flow[item];
        if (index >= 0) {
            const Flow& flow = p_.flows[index];
            resource = num_ranks_ + index;
            ++moving_[rank];
            ++sharing_[flow.send_group];
            if (flow.receive_group >= 0) ++sharing_[flow.receive_group];
        }
        const double end = clock_[resource] + items.cost[item];
        push(active_[resource], Running{end, serial_++, wg, queue, item});
    }

    bool left(int rank, int queue) const {
        return heads_[rank][queue] < p_.ranks[rank].queues[queue].claims;
    }

    void next(int rank, int wg) {
        const Rank& spec = p_.ranks[rank];
        Workgroup& self = wgs_[rank][wg];
        if (self.role == kMover) {
            if (move(rank, wg)) return;
            self.role = spec.after[wg];
        }
        if (self.role == kGone) return;
        if (self.role == kDual) {
            dual(rank, wg);
            return;
        }
        if (self.role == kPlanned) {
            const bool early =
                self.stolen < spec.steal && heads_[rank][kTiles] < spec.switch_at;
            if (early && left(rank, kTiles)) {
                ++self.stolen;
                take(rank, wg, kTiles);
                return;
            }
            self.role = kReducer;
        }
        if (self.role == kBuilder) {
            const bool blocked = spec.alternate && left(rank, kTiles) &&
                                 held_by(rank, kTiles, heads_[rank][kTiles]) >= 0;
            if (blocked && left(rank, kUpstream)) {
                take(rank, wg, kUpstream);
                return;
            }
            if (left(rank, kTiles)) {
                take(rank, wg, kTiles);
                return;
            }
            if (joined_[rank] >= spec.join) return;
            ++joined_[rank];
            self.role = kReducer;
        }
        for (const int queue : {kDownstream, kUpstream}) {
            if (left(rank, queue)) {
                take(rank, wg, queue);
                return;
            }
        }
    }

    bool move(int rank, int wg) {
        if (!left(rank, kUpstream)) return false;
        Workgroup& self = wgs_[rank][wg];
        self.turn = !self.turn;
        if (p_.ranks[rank].alternate && !self.turn && left(rank, kTiles) &&
            held_by(rank, kTiles, heads_[rank][kTiles]) < 0) {
            take(rank, wg, kTiles);
            return true;
        }
        take(rank, wg, kUpstream);
        return true;
    }

    void dual(int rank, int wg) {
        Workgroup& self = wgs_[rank][wg];
        if (self.reserved < 0 && left(rank, kDownstream))
            self.reserved = heads_[rank][kDownstream]++;
        const bool tiles = left(rank, kTiles);
        if (self.reserved >= 0 && (!tiles || held_by(rank, kDownstream, self.reserved) < 0)) {
            const int item = self.reserved;
            self.reserved = -1;
            self.claimed = now_;
            start_or_wait(rank, wg, kDownstream, item);
        } else if (tiles) {
            take(rank, wg, kTiles);
        }
    }

    void check_done() const {
        for (int rank = 0; rank < num_ranks_; ++rank) {
            for (int queue = 0; queue < kNumQueues; ++queue) {
                const int rest = p_.ranks[rank].queues[queue].claims - heads_[rank][queue];
                if (rest > 0)
                    throw Stalled("rank " + std::to_string(rank) + ": " + std::to_string(rest) +
                                  " items of queue " + std::to_string(queue) +
                                  " were never claimed; give a crew to that queue");
            }
        }
        if (waiters_.empty()) return;
        std::size_t items = 0;
        int first = std::numeric_limits<int>::max();
        for (const auto& [counter, waiting] : waiters_) {
            items += waiting.size();
            first = std::min(first, counter);
        }
        throw Stalled(std::to_string(items) + " items wait for ever, the first for counter " +
                      std::to_string(first) + " at " + std::to_string(counters_[first]) +
                      "; signal it");
    }

    const Program& p_;
    const bool trace_;
    const int num_ranks_;
    double now_ = 0.0;
    std::int64_t serial_ = 0;
    std::vector<std::int64_t> counters_;
    std::vector<double> clock_, rate_;
    std::vector<std::vector<Running>> active_;
    std::vector<int> sharing_, moving_, joined_;
    std::vector<std::vector<int>> heads_;
    std::vector<std::vector<Workgroup>> wgs_;
    std::vector<Timer> timers_;
    std::unordered_map<int, std::vector<Waiter>> waiters_;
    Played played_;
};

}  // namespace

Played play(const Program& program, bool trace) { return Engine(program, trace).run(); }

}  // namespace kosmos
