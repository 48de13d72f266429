"""Starts SGLang's server on this machine's CPU: ``python runtime_cpu/launch.py --model-path M``.

Sets the environment that SGLang's CPU engine needs, puts the stand-ins of ``stubs/`` and the plugin
of ``plugins/`` on the import path, adds the CPU defaults that the caller did not choose, and
replaces itself with ``python -m sglang.launch_server``: the process id stays, so a signal reaches
the server itself.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STUBS = Path(__file__).resolve().parent / "stubs"
PLUGINS = STUBS.with_name("plugins")

# One thread a process: oversubscribed, a server was measured at 0.4 tokens a second.
# Nothing is compiled on this path, and without the compiler each process imports faster.
DEFAULT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # A server of which a process ends would wait 65 s for dumps of a GPU's state before it ends.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}

DEFAULT_OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    # "auto" would turn a float32 checkpoint into float16.
    "--dtype": "bfloat16",
}

# Without a bound SGLang allocates and zeroes most of the memory as its KV pool: 18 s for 16 GB.
DEFAULT_MAX_TOTAL_TOKENS = "131072"
# Where torch keeps the C++ extensions that it builds: SGLang's page hash.
EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
_POOL_SIZE_OPTIONS = ("--max-total-tokens", "--mem-fraction-static")


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for a server (or an ``sglang.Engine``) on the CPU.

    Args:
        base: the environment to start from; the process's own when None. What it already sets of
            the defaults is kept.
    """
    env = dict(os.environ if base is None else base)
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    for name, value in DEFAULT_ENVIRONMENT.items():
        env.setdefault(name, value)
    if sys.prefix != sys.base_prefix:
        env.setdefault(EXTENSIONS_VARIABLE, extensions_folder())
    own = [str(STUBS), str(PLUGINS)]
    inherited = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    env["PYTHONPATH"] = os.pathsep.join([*own, *(e for e in inherited if e not in own)])
    return env


def extensions_folder(release: str = "") -> str:
    """Where the extensions of this virtual environment are kept.

    Torch's own place is in HOME, and what two SGLangs build there is the same file: each start of
    one's servers behind one of the other's would compile it again, with all others waiting.

    Args:
        release: of another SGLang than the one in this environment.
    """
    return os.path.join(sys.prefix, f"torch-extensions{release and f'-{release}'}")


def arguments(given: Sequence[str]) -> list[str]:
    """Returns the server's arguments: the CPU defaults that `given` leaves open, then `given`."""
    chosen = {arg.partition("=")[0] for arg in given if arg.startswith("--")}
    chosen |= _options_in_config_file(given)
    defaults: list[str] = []
    for option, value in DEFAULT_OPTIONS.items():
        if option not in chosen:
            defaults += [option, value]
    if not chosen.intersection(_POOL_SIZE_OPTIONS):
        defaults += ["--max-total-tokens", DEFAULT_MAX_TOTAL_TOKENS]
    return [*defaults, *given]


def command(given: Sequence[str]) -> list[str]:
    """Returns the full command line of the server, in this interpreter."""
    return [sys.executable, "-m", "sglang.launch_server", *arguments(given)]


def _options_in_config_file(given: Sequence[str]) -> set[str]:
    """Options set in a ``--config`` YAML file; an option on the command line would override it."""
    for index, arg in enumerate(given):
        name, _, value = arg.partition("=")
        if name == "--config":
            path = value or (given[index + 1] if index + 1 < len(given) else "")
            break
    else:
        return set()
    import yaml  # comes with SGLang; only needed here

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return set()  # SGLang reports the file itself
    keys = content if isinstance(content, dict) else {}
    return {"--" + str(key).replace("_", "-") for key in keys}


def main() -> None:
    """Replaces this process with the server."""
    line = command(sys.argv[1:])
    os.execve(line[0], line, environment())


if __name__ == "__main__":
    main()
