"""Shortest schedules of small pipelines with random costs, by OR-tools.

usage: python optima.py SECONDS > optima.jsonl      (ortools 9.15; SECONDS for each placement)
       python optima.py SECONDS 0 SEED COUNT        (COUNT more cases of random sizes and limits)

A case is solved for every given placement of the stages; `optimum` is the shortest makespan of all,
`bound` what no schedule of these placements is shorter than. Both are the same where the solver
came to its end.
"""
import json, random, sys
from ortools.sat.python import cp_model


def placements(ranks, chunks):
    stages = range(ranks * chunks)
    if chunks == 1:
        return [list(stages)]
    if ranks * chunks <= 6:
        found, open_ = [], [[]]
        while open_:
            head = open_.pop()
            if len(head) == ranks * chunks:
                found.append(head)
                continue
            new = max(head, default=-1) + 1
            for rank in range(min(new + 1, ranks)):
                if head.count(rank) < chunks:
                    open_.append(head + [rank])
        return sorted(found)
    there = [s % ranks if s // ranks % 2 == 0 else ranks - 1 - s % ranks for s in stages]
    return [[s % ranks for s in stages], there]


def solve(case, placement, seconds, shorter_than):
    stages, m = len(placement), case["microbatches"]
    times = {kind: case[kind] for kind in "FIW"}
    horizon = m * sum(map(sum, times.values())) + 4 * m * sum(case["C"])
    horizon = min(horizon, shorter_than or horizon)
    model = cp_model.CpModel()
    on = [[] for _ in range(case["ranks"])]
    kept = [[] for _ in range(case["ranks"])]
    start, end = {}, {}
    for s in range(stages):
        for b in range(m):
            for kind in "FIW":
                key = (kind, s, b)
                start[key] = model.new_int_var(0, horizon, "")
                end[key] = start[key] + times[kind][s]
                on[placement[s]].append(model.new_fixed_size_interval_var(start[key], times[kind][s], ""))
                if b:
                    model.add(start[key] >= end[kind, s, b - 1])
            model.add(start["W", s, b] >= end["I", s, b])
            size = model.new_int_var(0, horizon, "")
            begin, stop = start["F", s, b], end["W", s, b]
            kept[placement[s]].append(model.new_interval_var(begin, size, stop, ""))
    hop = [c if placement[s] != placement[s + 1] else 0 for s, c in enumerate(case["C"])]
    for b in range(m):
        for s in range(1, stages):
            model.add(start["F", s, b] >= end["F", s - 1, b] + hop[s - 1])
            model.add(start["I", s - 1, b] >= end["I", s, b] + hop[s - 1])
        model.add(start["I", stages - 1, b] >= end["F", stages - 1, b])
    for rank in range(case["ranks"]):
        model.add_no_overlap(on[rank])
        if case["limit"]:
            model.add_cumulative(kept[rank], [1] * len(kept[rank]), int(case["limit"] * case["chunks"]))
    makespan = model.new_int_var(0, horizon, "")
    for s in range(stages):
        model.add(makespan >= end["W", s, m - 1])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, horizon
    found = int(solver.objective_value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, min(horizon, int(solver.best_objective_bound))


def shortest(case, seconds):
    best, bound = None, None
    for placement in placements(case["ranks"], case["chunks"]):
        found, least = solve(case, placement, seconds, best)
        best = min(x for x in (best, found) if x is not None) if (best or found) else None
        bound = least if bound is None else min(bound, least)
    case["optimum"], case["bound"] = best, min(bound, best)
    print(json.dumps(case), flush=True)


def grid():
    flat = [(2, 4), (2, 8), (3, 4), (3, 8), (4, 4), (4, 8)]
    for chunks, sizes in (1, flat), (2, [(2, 4), (2, 8), (3, 4), (4, 4), (4, 8)]):
        for ranks, m in sizes:
            for limit in (None, ranks, max(1, ranks - 1), 1):
                for even in (False, True) if limit == ranks else (False,):
                    yield ranks, m, chunks, limit, (90, 110) if even else (50, 200), (0, 10, 30)


def more(count):
    for _ in range(count):
        chunks, ranks, m = random.choice((1, 2, 2)), random.randint(2, 4), random.randint(3, 8)
        limit = random.choice((None, *range(1, ranks + 1)))
        spread = random.choice(((90, 110), (50, 200), (10, 300)))
        yield ranks, m, chunks, limit, spread, (0, 10, 30, 100)


def main():
    seconds, first, seed, count = [float(x) for x in sys.argv[1:]] + [0, 14, 0][len(sys.argv) - 2 :]
    random.seed(int(seed))
    for number, (ranks, m, chunks, limit, spread, hops) in enumerate(more(int(count)) if count else grid()):
        case = {"ranks": ranks, "microbatches": m, "chunks": chunks, "limit": limit}
        for kind in "FIW":
            case[kind] = [random.randint(*spread) for _ in range(ranks * chunks)]
        case["C"] = [random.choice(hops)] * (ranks * chunks - 1)
        if number >= first:
            shortest(case, seconds)


main()
