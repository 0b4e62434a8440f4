"""The mesh, without any group: ranks in Megatron-Core's order.

Tensor fastest, then context, data, pipeline.
"""

SIZES = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
PLACE = {"rank": 0}


def place(rank: int, *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> None:
    PLACE["rank"] = rank
    SIZES.update(tp=tp, cp=cp, dp=dp, pp=pp)


def _coordinate(axis: str) -> int:
    rest = PLACE["rank"]
    for name, size in SIZES.items():
        if name == axis:
            return rest % size
        rest //= size
    raise KeyError(axis)


def get_tensor_model_parallel_rank() -> int:
    return _coordinate("tp")


def get_context_parallel_rank() -> int:
    return _coordinate("cp")


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return (
        _coordinate("dp") * SIZES["cp"] + _coordinate("cp")
        if with_context_parallel
        else _coordinate("dp")
    )


def get_pipeline_model_parallel_rank() -> int:
    return _coordinate("pp")


def destroy_model_parallel() -> None:
    SIZES.update(tp=1, cp=1, dp=1, pp=1)
