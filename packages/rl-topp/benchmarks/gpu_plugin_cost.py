"""What the SGLang plugin costs on one GPU: its kernels alone, then a decode step in the engine.

    python packages/rl-topp/benchmarks/gpu_plugin_cost.py [check] [kernels] [engine]

All three by default.

`check` sets and log-probs of the CUDA way against float64 on random rows; `kernels` sampling of [64
| 256 | 512, V = 151,936] against the sort of SGLang's pytorch backend and against flashinfer where
it runs; `engine` a server with a random Qwen3-0.6B (bf16, triton attention, CUDA graphs for
decoding) that 256 requests share, the variants interleaved over rounds, each step timed inside the
scheduler (see gpu_plugin_timing.py). The temperature is chosen so that top_p 0.95 keeps about 5
ids. Needs torch, triton, numpy, safetensors and an importable sglang; rl-topp is taken from this
checkout and need not be installed. `--tiny` tests the program on the CPU with small shapes: `check`
and `kernels`, and `engine` with a small model where it is named, since a server starts for it. With
OUT set, figures go to $OUT/gpu_plugin_cost.json.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gpu_plugin_server import DEVICE, FULL_BATCH, TINY, VOCAB_SIZE, say, server

from rl_topp.reference import nucleus
from rl_topp.sglang.draw import Filters, draw_step
from rl_topp.sglang.step import StepRows

NEW_TOKENS = 12 if TINY else 100
ROUNDS = 2 if TINY else 6
TOP_P = 0.95
WANTED_KEPT = 5.0
VARIANTS = {
    "stock/pytorch": "plugin not there, SGLang's pytorch sampler (sorts the vocabulary)",
    "hooked/pytorch": "plugin there, nobody asks",
    "asked/pytorch": "plugin there, every request asks",
    "stock/flashinfer": "plugin not there, flashinfer's sampler",
    "hooked/flashinfer": "flashinfer's sampler, plugin there, nobody asks",
    "stock/pytorch/unfiltered": "no filter (top_p 1), for scale",
}
FIGURES: dict[str, Any] = {}


def draw(
    probs: torch.Tensor, filters: Filters, uniform: torch.Tensor, *, prefix_size: int = 1024
) -> Any:
    """Sample on the device at hand."""
    if TINY:
        return draw_step(
            probs,
            filters,
            [True] * len(probs),
            lambda weights, _: torch.multinomial(weights, 1),
            prefix_size=prefix_size,
        )
    from rl_topp.sglang.kernels import draw_step_on_device

    return draw_step_on_device(probs, filters, uniform, None, prefix_size=prefix_size)


def check() -> None:
    """Compare sets and log-probs with float64; sets may differ by ids of next to no mass."""
    rng = np.random.default_rng(0)
    compared = skipped = 0
    for vocab_size, spread, prefix_size in (
        (100, 2.0, 1024),
        (5_000, 1.0, 1024),
        (5_000, 0.2, 64),
        (VOCAB_SIZE, 12.0, 1024),
        (VOCAB_SIZE, 0.6, 1024),
    ):
        num_rows = 24
        logits = torch.tensor(rng.normal(size=(num_rows, vocab_size)) * spread, dtype=torch.float32)
        probs = torch.softmax(logits.to(DEVICE), -1)
        top_k = rng.choice([1, 50, 1 << 30, 1 << 30], num_rows)
        top_p = rng.choice([0.3, 0.8, 0.95, 1.0], num_rows).astype(np.float32)
        min_p = rng.choice([0.0, 0.0, 0.01], num_rows).astype(np.float32)
        filters = Filters(
            top_ks=torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
            top_ps=torch.tensor(top_p, device=DEVICE),
            min_ps=torch.tensor(min_p, device=DEVICE),
        )
        step = draw(probs, filters, torch.rand(num_rows, device=DEVICE), prefix_size=prefix_size)
        rows = StepRows(step, [True] * num_rows)
        for row in range(num_rows):
            p = probs[row].double().cpu().numpy()
            ids, log_prob = rows.row(row)
            sampled = int(step.ids_B[row])
            assert ids is not None and sampled in ids, (vocab_size, row)
            assert len(set(ids)) == len(ids)
            assert abs(log_prob - np.log(p[sampled] / p[ids].sum())) < 1e-3, (
                vocab_size,
                row,
                log_prob,
            )
            expected = nucleus(
                p,
                top_k=min(int(top_k[row]), vocab_size),
                top_p=float(top_p[row]),
                min_p=float(min_p[row]),
            )
            expected = expected[p[expected] > 0]
            different = np.setxor1d(ids, expected)
            if different.size == 0:
                compared += 1
            else:
                # Float32 sums: what differs carries next to no mass.
                assert p[different].sum() < 1e-5, (
                    vocab_size,
                    row,
                    different.size,
                    p[different].sum(),
                )
                skipped += 1
    say(
        f"check: {compared} sets equal float64's, {skipped} differ by less than 1e-5 of mass; every"
        " sampled id in its set"
    )
    FIGURES["check"] = {"equal": compared, "within_rounding": skipped}


def median_ms(run: Any, count: int = 20) -> float:
    """Return the median time of `run`, between CUDA events after a warm-up."""
    for _ in range(3):
        run()
    if TINY:
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def sort_and_draw(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Do what a sampler that sorts does: sort, running sum, cut, draw."""
    ranked, ids = probs.sort(dim=-1, descending=True)
    before = torch.cumsum(ranked, dim=-1) - ranked
    ranked[before > top_ps.view(-1, 1)] = 0.0
    return ids.gather(1, torch.multinomial(ranked, 1))


def spread_for(wanted: float) -> float:
    """Find the deviation of normal logits at which top_p keeps `wanted` ids in the mean."""
    low, high = 0.5, 60.0
    noise = torch.randn(64, VOCAB_SIZE, device=DEVICE)
    for _ in range(20):
        middle = (low + high) / 2
        ranked = torch.softmax(noise * middle, -1).sort(dim=-1, descending=True).values
        kept = float(((torch.cumsum(ranked, -1) - ranked) <= TOP_P).sum(-1).float().mean())
        low, high = (middle, high) if kept > wanted else (low, middle)
    return low


def kernels() -> None:
    """Time one step's sampling alone."""
    spread = spread_for(WANTED_KEPT)
    try:
        from flashinfer.sampling import top_k_top_p_sampling_from_probs as flashinfer_draw
    except Exception as error:
        say(f"flashinfer's sampler does not run here: {error}")
        flashinfer_draw = None
    say(
        f"\nsampling alone, V = {VOCAB_SIZE:,}, top_p {TOP_P}, mean kept {WANTED_KEPT:g} unless"
        " said; ms, median of 20"
    )
    say(
        f"{'rows':>5} {'softmax':>8} {'sort and draw':>14} {'plugin':>8} {'of it top-k':>12}"
        f" {'flashinfer':>11} {'plugin, 95 % of V kept':>23}"
    )
    table = []
    for num_rows in (8,) if TINY else (64, 256, 512):
        logits = torch.randn(num_rows, VOCAB_SIZE, device=DEVICE)
        probs, flat = torch.softmax(logits * spread, -1), torch.softmax(logits * 0.1, -1)
        top_ps = torch.full((num_rows,), TOP_P, device=DEVICE)
        top_ks = torch.full((num_rows,), 1 << 30, dtype=torch.int32, device=DEVICE)
        filters = Filters(top_ks=top_ks, top_ps=top_ps, min_ps=None)
        times: dict[str, float | None] = {
            "softmax": median_ms(lambda logits=logits: torch.softmax(logits, -1)),
            "sort": median_ms(lambda probs=probs, top_ps=top_ps: sort_and_draw(probs, top_ps)),
            "plugin": median_ms(
                lambda probs=probs, filters=filters, n=num_rows: draw(
                    probs, filters, torch.rand(n, device=DEVICE)
                )
            ),
            "top_k": median_ms(
                lambda probs=probs: torch.topk(probs, min(1024, VOCAB_SIZE), dim=-1)
            ),
            "flashinfer": None,
            "plugin_flat": median_ms(
                lambda probs=flat, filters=filters, n=num_rows: draw(
                    probs, filters, torch.rand(n, device=DEVICE)
                )
            ),
        }
        if flashinfer_draw is not None:
            with contextlib.suppress(Exception):
                all_ids = torch.full((num_rows,), VOCAB_SIZE, dtype=torch.int32, device=DEVICE)
                times["flashinfer"] = median_ms(
                    lambda probs=probs, k=all_ids, top_ps=top_ps: flashinfer_draw(
                        probs, k, top_ps, filter_apply_order="joint"
                    )
                )
        table.append({"rows": num_rows, **times})
        shown = {name: "-" if value is None else f"{value:.3f}" for name, value in times.items()}
        say(
            f"{num_rows:>5} {shown['softmax']:>8} {shown['sort']:>14} {shown['plugin']:>8}"
            f" {shown['top_k']:>12} {shown['flashinfer']:>11} {shown['plugin_flat']:>23}"
        )
    FIGURES["kernels"] = table


def ask(url: str, variant: str, count: int, new_tokens: int, temperature: float) -> list[Any]:
    """Let `count` requests run side by side in one variant."""
    rng = np.random.default_rng(1)
    custom = {
        "variant": variant,
        **({"return_top_p_token_ids": True} if variant.startswith("asked") else {}),
    }
    params = {
        "temperature": temperature,
        "top_p": 1.0 if variant.endswith("unfiltered") else TOP_P,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "custom_params": custom,
    }
    prompts = rng.integers(1, VOCAB_SIZE, (count, 64)).tolist()
    body = json.dumps(
        {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    ).encode()
    request = urllib.request.Request(
        f"{url}/generate", data=body, headers={"Content-Type": "application/json"}
    )
    answers: list[Any] = json.load(urllib.request.urlopen(request, timeout=300))
    return answers


def mean_kept(answers: list[Any]) -> float:
    """Return the mean size of the kept sets of some answers."""
    return float(
        np.mean([len(ids) for answer in answers for ids in answer["meta_info"]["rl_topp_kept_ids"]])
    )


def choose_temperature(url: str) -> tuple[float, float]:
    """Return a temperature that keeps about the wanted number of ids, and that number.

    Checks every answer on the way.
    """
    low, high, best = 0.005, 1.0, (1.0, float(VOCAB_SIZE))
    for _ in range(9):
        temperature = (low * high) ** 0.5
        answers = ask(url, "asked/pytorch", min(FULL_BATCH, 32), 8, temperature)
        for answer in answers:
            check_answer(answer)
        kept = mean_kept(answers)
        best = min(best, (temperature, kept), key=lambda pair: abs(np.log(pair[1] / WANTED_KEPT)))
        low, high = (low, temperature) if kept > WANTED_KEPT else (temperature, high)
    return best


def check_answer(answer: dict[str, Any]) -> None:
    """Check that sampled ids are in their sets, and that sets hold top_p of the mass or more.

    Log-probs rise by at most -log(top_p) over them.
    """
    meta = answer["meta_info"]
    for token, full, ids, kept in zip(
        answer["output_ids"],
        meta["output_token_logprobs"],
        meta["rl_topp_kept_ids"],
        meta["rl_topp_kept_log_probs"],
        strict=True,
    ):
        assert token in ids, (token, ids)
        assert -1e-3 <= kept - full[0] <= -np.log(TOP_P) + 1e-3, (kept, full[0])


def engine() -> None:
    """Time decode steps of all variants, interleaved."""
    with tempfile.TemporaryDirectory(prefix="plugin-cost-") as name, server(Path(name)) as url:
        temperature, kept = choose_temperature(url)
        say(f"temperature {temperature:.4f}: top_p {TOP_P} keeps {kept:.1f} ids in the mean")
        variants = [variant for variant in VARIANTS if not (TINY and "flashinfer" in variant)]
        for variant in list(variants):
            try:
                ask(url, variant, FULL_BATCH, 4, temperature)
            except OSError as error:
                say(f"{variant}: does not run here ({error})")
                variants.remove(variant)
        Path(name, "timings.jsonl").unlink(missing_ok=True)
        for number in range(ROUNDS):
            for variant in variants[number % len(variants) :] + variants[: number % len(variants)]:
                ask(url, variant, FULL_BATCH, NEW_TOKENS, temperature)
        ask(url, "end/pytorch", 1, 1, temperature)
        time.sleep(1.0)
        waves = [json.loads(line) for line in Path(name, "timings.jsonl").read_text().splitlines()]
    report(waves, kept, temperature)


def report(waves: list[Any], kept: float, temperature: float) -> None:
    """Print medians and spreads per variant, and what each costs against SGLang's own sampler."""
    say(
        f"\ndecode step of {FULL_BATCH} requests inside the engine, ms; median over rounds of each"
        " round's median, in brackets the rounds' range"
    )
    table: dict[str, Any] = {}
    for variant, words in VARIANTS.items():
        of_variant = [wave for wave in waves if wave["variant"] == variant and wave["step_ms"]]
        if not of_variant:
            continue
        steps = [statistics.median(wave["step_ms"]) for wave in of_variant]
        samples = [statistics.median(wave["sample_ms"]) for wave in of_variant if wave["sample_ms"]]
        table[variant] = {"step_ms": steps, "sample_ms": samples}
        versus = ""
        if "stock/pytorch" in table:
            stock = statistics.median(table["stock/pytorch"]["step_ms"])
            versus = f"{100 * (statistics.median(steps) / stock - 1):+6.1f} %"
        sampler = f"{statistics.median(samples):.3f}" if samples else "-"
        say(
            f"{variant:<26} {statistics.median(steps):7.3f} ({min(steps):.3f}-{max(steps):.3f})"
            f" {versus:>9}  sampler on the GPU {sampler:>6}   {words}"
        )
    FIGURES["engine"] = {"mean_kept": kept, "temperature": temperature, "variants": table}


def main() -> None:
    """Run the stages that are named, or all."""
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    stages = named or ["check", "kernels", *([] if TINY else ["engine"])]
    FIGURES["versions"] = {
        "torch": torch.__version__,
        "device": "cpu" if TINY else torch.cuda.get_device_name(),
    }
    for stage in stages:
        {"check": check, "kernels": kernels, "engine": engine}[stage]()
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "gpu_plugin_cost.json").write_text(json.dumps(FIGURES))


if __name__ == "__main__":
    main()
