"""A stock SGLang server on a random Qwen3-0.6B with both plugins, for gpu_plugin_cost.py.

With `--tiny` a small one on the CPU.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
TINY = "--tiny" in sys.argv
DEVICE = torch.device("cpu" if TINY else "cuda")
VOCAB_SIZE = 300 if TINY else 151_936
FULL_BATCH = 8 if TINY else 256
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64 if TINY else 1024,
    "intermediate_size": 128 if TINY else 3072,
    "num_hidden_layers": 2 if TINY else 28,
    "num_attention_heads": 4 if TINY else 16,
    "num_key_value_heads": 2 if TINY else 8,
    "head_dim": 16 if TINY else 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32" if TINY else "bfloat16",
    "eos_token_id": 0,
}


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def write_model(folder: Path) -> None:
    """Write random weights in Hugging Face layout."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    dtype = getattr(torch, str(CONFIG["torch_dtype"]))
    hidden, inner, head = (
        int(CONFIG["hidden_size"]),
        int(CONFIG["intermediate_size"]),
        int(CONFIG["head_dim"]),
    )
    query, key = (
        int(CONFIG["num_attention_heads"]) * head,
        int(CONFIG["num_key_value_heads"]) * head,
    )
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden), "model.norm.weight": (hidden,)}
    for layer in range(int(CONFIG["num_hidden_layers"])):
        start = f"model.layers.{layer}."
        shapes |= {
            f"{start}{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (query, hidden),
                "self_attn.k_proj": (key, hidden),
                "self_attn.v_proj": (key, hidden),
                "self_attn.o_proj": (hidden, query),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    weights = {
        name: (
            torch.ones(shape, dtype=dtype)
            if len(shape) == 1
            else (torch.randn(shape, device=DEVICE) * 0.02).to(dtype).cpu()
        )
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_entry_points(folder: Path) -> None:
    """Make both plugins discoverable without an installation: metadata folders on PYTHONPATH."""
    for name, value in (
        ("rl_topp", "rl_topp.sglang.plugin:register"),
        ("rl_topp_timing", "gpu_plugin_timing:register"),
    ):
        info = folder / f"{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {value}\n")


def command_line(model: Path, port: int) -> list[str]:
    """Return the command that starts the server."""
    shared = (
        f"--model-path {model} --port {port} --skip-tokenizer-init --skip-server-warmup"
        " --grammar-backend none --disable-radix-cache --random-seed 0 --sampling-backend pytorch"
    )
    on_cpu = (
        "--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 4096"
        " --sleep-on-idle"
    )
    on_gpu = (
        f"--attention-backend triton --mem-fraction-static 0.5 --max-running-requests {FULL_BATCH}"
        f" --cuda-graph-bs-decode {FULL_BATCH} --cuda-graph-backend-prefill disabled"
    )
    arguments = shlex.split(f"{shared} {on_cpu if TINY else on_gpu}")
    return [sys.executable, "-m", "sglang.launch_server", *arguments]


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of the server: where the plugins lie, and what it need not load."""
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(folder / "site"), str(SOURCE), str(HERE), os.environ.get("PYTHONPATH", "")]
        ),
        "RL_TOPP_TIMINGS": str(folder / "timings.jsonl"),
        "RL_TOPP_FULL_BATCH": str(FULL_BATCH),
        "SGLANG_GRPC_PORT": "1",
        **({"SGLANG_USE_CPU_ENGINE": "1"} if TINY else {}),
    }
    kept = {"qwen3", "registry", "utils", "transformers"}
    for models in _models_folders():
        found["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
            sorted(path.stem for path in Path(models).glob("*.py") if path.stem not in kept)
        )
    return found


def wait_until_up(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Return when the server answers; leave the program when it cannot."""
    started = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/model_info", timeout=5).read()
            break
        if process.poll() is not None or time.monotonic() - started > 400:
            raise SystemExit(
                f"the server did not start; end of its log:\n{log.read_text()[-4000:]}"
            )
        time.sleep(0.5)
    say(f"\nserver up after {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run a stock SGLang server with both plugins; gives its URL."""
    (folder / "model").mkdir()
    (folder / "site").mkdir()
    write_model(folder / "model")
    write_entry_points(folder / "site")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command_line(folder / "model", port),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=environment_of(folder),
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, url, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "server.log").write_bytes(log.read_bytes()[-200_000:])


def _models_folders() -> Iterator[str]:
    """Yield the folder of SGLang's model modules, without importing SGLang."""

    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.origin is not None:
        yield str(Path(spec.origin).parent / "srt" / "models")
