# SPDX-License-Identifier: Apache-2.0
"""`python -m validate COMMAND ...`: one row of COMMANDS per command, each a module with `main(arguments) -> int`."""

from __future__ import annotations

import importlib
import sys

# command -> (module of this package, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "make-checkpoint": ("make_checkpoint", "write a synthetic EXL3 checkpoint of any layout"),
    "check-checkpoint": ("check_checkpoint", "audit a checkpoint from its headers alone"),
    "audit-log": ("audit_log", "what a server's log says that its answers do not"),
    "smoke": ("smoke", "does a running server chat, call tools and keep to a schema"),
    "needle": ("needle", "does a running server find a sentence in long prompts"),
    "decode": ("decode", "how fast a running server decodes, and what its drafts are worth"),
    "receipt": ("receipt", "what results belong to: build, trees, checkpoint, GPUs, server"),
    "plot": ("plot", "results of needle or decode as a picture"),
    "preflight": ("preflight", "can this machine serve that checkpoint"),
    "launch": ("launch", "preset and variables to vllm serve, as the images do it"),
}


def main(arguments: list[str]) -> int:
    """Run one command. A module is imported only when asked for, so none pays for another's dependencies."""
    if arguments and arguments[0] in COMMANDS:
        module, _ = COMMANDS[arguments[0]]
        return importlib.import_module(f"{__package__}.{module}").main(arguments[1:])
    wanted_help = bool(arguments) and arguments[0] in ("-h", "--help")
    out = sys.stdout if wanted_help else sys.stderr
    if arguments and not wanted_help:
        print(f"validate: no command {arguments[0]!r}", file=out)
    print("usage: python -m validate COMMAND ...", file=out)
    for name, (_, purpose) in COMMANDS.items():
        print(f"  {name:18} {purpose}", file=out)
    return 0 if wanted_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
