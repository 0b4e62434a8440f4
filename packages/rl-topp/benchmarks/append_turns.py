"""Appending n turns costs linear time: the ratio of twice as many turns stays near 2.

python packages/rl-topp/benchmarks/append_turns.py
"""

import argparse
import time

import numpy as np

from rl_topp import NucleusSet

TOKENS_PER_TURN, IDS_PER_TOKEN, VOCAB_SIZE = 100, 5, 151_936


def seconds(num_turns: int) -> float:
    ids = np.tile(np.arange(IDS_PER_TOKEN), TOKENS_PER_TURN)
    offsets = np.arange(TOKENS_PER_TURN + 1) * IDS_PER_TOKEN
    generated = NucleusSet(
        ids=ids, offsets=offsets, status=np.zeros(TOKENS_PER_TURN, np.uint8), vocab_size=VOCAB_SIZE
    )
    tools = NucleusSet.not_sampled(20, vocab_size=VOCAB_SIZE)
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        nucleus = NucleusSet.empty(vocab_size=VOCAB_SIZE)
        for _ in range(num_turns):
            nucleus = nucleus.append(generated).append(tools)
        best = min(best, time.perf_counter() - start)
    assert len(nucleus) == num_turns * (TOKENS_PER_TURN + 20)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="2 and 4 turns")
    sizes = (2, 4) if parser.parse_args().tiny else (250, 500, 1000, 2000, 4000)
    times = {turns: seconds(turns) for turns in sizes}
    for turns, best in times.items():
        print(f"{turns:5d} turns: {1e3 * best:7.1f} ms, {1e6 * best / turns:5.1f} us per turn")


if __name__ == "__main__":
    main()
