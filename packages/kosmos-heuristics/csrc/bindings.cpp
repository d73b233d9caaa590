// Python's program in, Python's numbers out; simulate/native.py wraps them in its dataclasses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

py::tuple play_program(const py::object& object, bool trace) {
    const Program program = read_program(object);
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
    module.doc() = "Native core of the simulator";
    py::register_exception<Stalled>(module, "Stalled", PyExc_RuntimeError);
    module.def("play", &play_program, py::arg("program"), py::arg("trace"));
}
