"""Reports: of one run, or of a comparison, from what they logged, at any time.

>>> from lit_rlhf.report import write_report
>>> write_report("checkpoints/runs/quickstart-grpo")  # doctest: +SKIP
PosixPath('checkpoints/runs/quickstart-grpo/report.html')
"""

from lit_rlhf.report.comparison import Arm, ArmRun, Comparison, read_folder
from lit_rlhf.report.runs import EvaluationFile, Run, RungAlarm, Series, read_run
from lit_rlhf.report.writing import write_report

__all__ = [
    "Arm",
    "ArmRun",
    "Comparison",
    "EvaluationFile",
    "Run",
    "RungAlarm",
    "Series",
    "read_folder",
    "read_run",
    "write_report",
]
