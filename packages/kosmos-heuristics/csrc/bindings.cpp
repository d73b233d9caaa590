// Python's program in, Python's numbers out; simulate/native.py wraps them in its dataclasses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "program.hpp"

namespace py = pybind11;
using namespace kosmos;

namespace {

template <typename T>
T field(const py::handle& object, const char* name) {
    return object.attr(name).cast<T>();
}

Queue read_queue(const py::handle& q) {
    Queue queue;
    queue.cost = field<std::vector<double>>(q, "cost");
    queue.flow = field<std::vector<int>>(q, "flow");
    queue.need_lo = field<std::vector<int>>(q, "need_lo");
    queue.need_hi = field<std::vector<int>>(q, "need_hi");
    queue.sig_lo = field<std::vector<int>>(q, "sig_lo");
    queue.sig_hi = field<std::vector<int>>(q, "sig_hi");
    queue.then = field<std::vector<int>>(q, "then");
    queue.claims = field<int>(q, "claims");
    return queue;
}

Rank read_rank(const py::handle& r) {
    Rank rank;
    for (const py::handle queue : r.attr("queues")) rank.queues.push_back(read_queue(queue));
    rank.starts = field<std::vector<double>>(r, "starts");
    rank.roles = field<std::vector<int>>(r, "roles");
    rank.after = field<std::vector<int>>(r, "after");
    rank.alternate = field<bool>(r, "alternate");
    rank.join = field<int>(r, "join");
    rank.steal = field<int>(r, "steal");
    rank.switch_at = field<int>(r, "switch_at");
    return rank;
}

Flow read_flow(const py::handle& f) {
    const auto sender = field<std::pair<int, int>>(f, "sender");
    const auto receiver = field<std::pair<int, int>>(f, "receiver");
    return {field<int>(f, "rank"), sender.first, sender.second, receiver.first, receiver.second};
}

Program read_program(const py::handle& p) {
    Program program;
    for (const py::handle rank : p.attr("ranks")) program.ranks.push_back(read_rank(rank));
    for (const py::handle flow : p.attr("flows")) program.flows.push_back(read_flow(flow));
    program.tables = field<std::vector<std::vector<double>>>(p, "tables");
    program.groups = field<int>(p, "groups");
    program.build_rate = field<std::vector<double>>(p, "build_rate");
    program.build_drag = field<std::vector<double>>(p, "build_drag");
    program.move_drag = field<std::vector<double>>(p, "move_drag");
    program.counters = field<std::vector<std::int64_t>>(p, "counters");
    program.flag_us = field<double>(p, "flag_us");
    return program;
}

void require(bool good, const char* what) {
    if (!good) throw py::value_error(std::string("program: ") + what);
}

// Everything that the core uses as an index, so that a program that is wrong cannot reach outside.
void check(const Program& program) {
    const int counters = static_cast<int>(program.counters.size());
    const int flows = static_cast<int>(program.flows.size());
    const int ranks = static_cast<int>(program.ranks.size());
    std::size_t most = 0;
    for (const Rank& rank : program.ranks) {
        const std::size_t wgs = rank.roles.size();
        most = std::max(most, wgs);
        require(rank.starts.size() == wgs && rank.after.size() == wgs,
                "starts, roles and after differ in length");
        require(rank.queues.size() == kNumQueues, "a rank has three queues");
        for (int kind = 0; kind < kNumQueues; ++kind) {
            const Queue& q = rank.queues[kind];
            const std::size_t size = q.cost.size();
            require(q.flow.size() == size && q.need_lo.size() == size && q.need_hi.size() == size &&
                        q.sig_lo.size() == size && q.sig_hi.size() == size && q.then.size() == size,
                    "the lists of a queue differ in length");
            require(q.claims >= 0 && q.claims <= static_cast<int>(size), "claims out of range");
            for (std::size_t i = 0; i < size; ++i) {
                require(q.cost[i] >= 0.0, "a cost is negative");
                require(q.need_lo[i] >= 0 && q.need_hi[i] <= counters, "need out of range");
                require(q.sig_lo[i] >= 0 && q.sig_hi[i] <= counters, "signal out of range");
                require(q.then[i] >= -1 && q.then[i] < static_cast<int>(size), "then out of range");
                // A tile's 0 is no flow.
                require(q.flow[i] >= 0 && q.flow[i] < flows + (kind == kTiles ? 1 : 0),
                        "flow out of range");
            }
        }
    }
    for (const Flow& flow : program.flows) {
        const int tables = static_cast<int>(program.tables.size());
        require(flow.rank >= 0 && flow.rank < ranks, "a flow's rank out of range");
        require(flow.send_table >= 0 && flow.send_table < tables && flow.receive_table < tables,
                "a flow's table out of range");
        require(flow.send_group >= 0 && flow.send_group < program.groups &&
                    flow.receive_group < program.groups,
                "a flow's group out of range");
    }
    require(program.build_rate.size() > most && program.build_drag.size() > most &&
                program.move_drag.size() > most,
            "rates are shorter than the grid");
}

// Groups that ranks share may hold every workgroup of every rank.
void check_tables(const Program& program) {
    std::size_t all = 0;
    for (const Rank& rank : program.ranks) all += rank.roles.size();
    for (const Flow& flow : program.flows) {
        const std::size_t own = program.ranks[flow.rank].roles.size();
        const std::size_t receivers = flow.receive_group >= 0 ? all : 0;
        require(program.tables[flow.send_table].size() > own, "a table is shorter than the grid");
        require(receivers == 0 || program.tables[flow.receive_table].size() > receivers,
                "a table is shorter than all grids");
    }
}

py::tuple play_program(const py::object& object, bool trace) {
    const Program program = read_program(object);
    check(program);
    check_tables(program);
    Played played;
    {
        py::gil_scoped_release release;
        played = play(program, trace);
    }
    py::list spans;
    for (const Span& s : played.spans)
        spans.append(py::make_tuple(s.rank, s.wg, s.queue, s.item, s.claimed, s.start, s.end));
    return py::make_tuple(played.end, played.busy, played.wait, played.events, spans);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.attr("VERSION") = kCoreVersion;
    module.doc() = "Native core of the simulator";
    py::register_exception<Stalled>(module, "Stalled", PyExc_RuntimeError);
    module.def("play", &play_program, py::arg("program"), py::arg("trace"));
}
