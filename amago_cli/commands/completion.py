"""`amago completion`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, reader


@reader
def completion(
    common: Common,
    shell: Annotated[
        str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=lambda: ["bash", "zsh", "fish"])
    ],
) -> Any:
    """Print a shell script that completes commands, recipes, environments, runs, checkpoints and settings.

    For bash, add `eval "$(amago completion bash)"` to ~/.bashrc; for zsh, add the same with zsh to ~/.zshrc, after
    compinit; for fish, save the script as ~/.config/fish/completions/amago.fish.

    Example: amago completion bash
    """
    from amago_cli.completion import SHELLS, script
    from amago_cli.render.output import Document
    from pipelines.errors import UsageError

    if shell not in SHELLS:
        raise UsageError(f"no completion for '{shell}'", hint=f"choose from {', '.join(SHELLS)}")
    made = script(shell)
    return Document(text=made, fields={"script": made})
