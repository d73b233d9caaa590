// What the core runs. The meaning of every field is documented once, in simulate/program.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace kosmos {

// CORE_VERSION of simulate/program.py.
constexpr int kCoreVersion = 2;

enum QueueKind : int { kTiles = 0, kUpstream = 1, kDownstream = 2, kNumQueues = 3 };
enum Role : int { kBuilder = 0, kMover = 1, kReducer = 2, kDual = 3, kPlanned = 4, kGone = 5 };

struct Queue {
    std::vector<double> cost;
    std::vector<int> flow, need_lo, need_hi, sig_lo, sig_hi, then;
    int claims = 0;
};

struct Flow {
    int rank = 0;
    int send_table = 0, send_group = 0;
    int receive_table = -1, receive_group = -1;
};

struct Rank {
    std::vector<Queue> queues;
    std::vector<double> starts;
    std::vector<int> roles, after;
    bool alternate = false;
    int join = 0, steal = 0, switch_at = 0;
};

struct Program {
    std::vector<Rank> ranks;
    std::vector<Flow> flows;
    std::vector<std::vector<double>> tables;
    int groups = 0;
    std::vector<double> build_rate, build_drag, move_drag;
    std::vector<std::int64_t> counters;
    double flag_us = 0.0;
};

struct Span {
    int rank, wg, queue, item;
    double claimed, start, end;
};

struct Played {
    std::vector<double> end;
    std::vector<std::vector<double>> busy, wait;
    std::int64_t events = 0;
    std::vector<Span> spans;
};

struct Stalled : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Played play(const Program& program, bool trace);

}  // namespace kosmos
