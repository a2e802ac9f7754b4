"""PyTorch's own order of DualPipeV as CSV, for `merak schedule --check FILE`.

usage: dualpipe_v.py RANKS MICROBATCHES
"""
import sys

from torch.distributed.pipelining.schedules import ScheduleDualPipeV

ranks, microbatches = map(int, sys.argv[1:])
schedule = object.__new__(ScheduleDualPipeV)  # the order alone needs no process group
schedule.pp_group_size, schedule._n_microbatches = ranks, microbatches
for rank in range(ranks):
    print(*schedule._calculate_single_rank_operations(rank), sep=",")
