"""What :class:`~lit_rlhf.callbacks.health_monitor.HealthMonitor` looks at: rules, signals, and how an alarm is told."""

from lit_rlhf.callbacks.health.report import Alarm, HealthReport
from lit_rlhf.callbacks.health.rule import HealthRule
from lit_rlhf.callbacks.health.rules import DEFAULT_RULES

__all__ = ["DEFAULT_RULES", "Alarm", "HealthReport", "HealthRule"]
