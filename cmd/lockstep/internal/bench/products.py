"""torch.matmul on the shapes of `lockstep bench products`: the seconds of a product for each line of the input."""

import sys
import time

import torch


def operand(batch, rows, columns, transposed):
    if transposed:
        return (torch.rand(batch, columns, rows) - 0.5).transpose(1, 2).squeeze(0)
    return (torch.rand(batch, rows, columns) - 0.5).squeeze(0)


def main():
    torch.set_num_threads(int(sys.argv[1]))
    known = {}
    print("ready", flush=True)
    for line in sys.stdin:
        transposed, *sizes = line.split()
        batch, rows, depth, columns = map(int, sizes)
        if line not in known:
            known[line] = (operand(batch, rows, depth, transposed == "a"), operand(batch, depth, columns, transposed == "b"),
                           operand(batch, rows, columns, False))
        a, b, c = known[line]
        torch.matmul(a, b, out=c)
        calls, elapsed, start = 0, 0, time.perf_counter()
        while elapsed < 0.01:
            torch.matmul(a, b, out=c)
            calls += 1
            elapsed = time.perf_counter() - start
        print(elapsed / calls, flush=True)


main()
