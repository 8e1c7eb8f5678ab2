"""Command line of the evaluation; the gateway's command line mounts it as ``firsttoken eval``.

Exit status of every command: 1 if requests or a gate failed, 2 for wrong usage or data.
"""

import click

from eval.commands.recall import recall


@click.group("eval")
def eval_group() -> None:
    """Measure what a reduction does to answers."""


for _command in (recall,):
    eval_group.add_command(_command)
