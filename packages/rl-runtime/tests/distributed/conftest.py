"""Real gloo ranks, forked from this process after it has imported torch and Megatron-Core once."""

import multiprocessing
import socket
import traceback
import warnings

import pytest

with warnings.catch_warnings():
    # Megatron-Core warns at import, and warnings are errors here.
    warnings.simplefilter("ignore")
    import torch

    import rl_runtime.training.trainer  # noqa: F401

_DEADLINE_SECONDS = 120.0


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank_main(connection, function, rank: int, rendezvous) -> None:
    warnings.resetwarnings()
    torch.set_num_threads(1)
    try:
        connection.send((True, function(rank, rendezvous)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


@pytest.fixture(scope="session")
def run_ranks():
    """Return `run(world_size, function)`: calls `function(rank, rendezvous)` in as many processes and returns their results in rank order."""

    def run(world_size: int, function):
        context = multiprocessing.get_context("fork")
        rendezvous = f"127.0.0.1:{_free_port()}"
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [context.Process(target=_rank_main, args=(sender, function, rank, rendezvous)) for rank, (_, sender) in enumerate(pipes)]
        for process in ranks:
            process.start()
        try:
            results = []
            for rank, (receiver, _) in enumerate(pipes):
                assert receiver.poll(_DEADLINE_SECONDS), f"rank {rank} of {world_size} did not answer in {_DEADLINE_SECONDS:g} s"
                done, result = receiver.recv()
                assert done, f"rank {rank} of {world_size}:\n{result}"
                results.append(result)
            return results
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
                process.join()

    return run
