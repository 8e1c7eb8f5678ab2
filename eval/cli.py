"""Command line of the evaluation; the gateway's command line mounts it as ``firsttoken eval``.

Exit status of every command: 1 if requests or a gate failed, 2 for wrong usage or data.
"""

import click

from eval.commands.ablation import ablation
from eval.commands.anonymise import anonymise
from eval.commands.load import load
from eval.commands.quantization import quantization
from eval.commands.recall import recall
from eval.commands.report import compare, report


@click.group("eval")
def eval_group() -> None:
    """Measure what a change does to answers, latency and memory."""


for _command in (recall, load, quantization, ablation, anonymise, report, compare):
    eval_group.add_command(_command)
