"""Estimate how many training steps fit into a wall-clock time, while the run continues.

The speed of a machine changes, so a number of steps that is fixed at the start does not keep a time budget. The clock
is read at each line of metrics. Between two readings the schedule depends on the step number alone.
"""

from dataclasses import dataclass, field

READINGS = 6


@dataclass
class TimeBudget:
    """Estimate of how many training steps fit into a wall-clock time, from measurements during the run.

    Attributes:
        seconds: Time for the whole run, in seconds.
        used: Seconds that the run took until it was last interrupted; 0 for a new run.
        reserve: Seconds to keep for the validation after the last step.
        readings: The last `READINGS` measurements, as pairs (finished steps, seconds used); they give the speed.

    Example:
        >>> budget = TimeBudget(100.0)
        >>> budget.last_step(0, used=10.0, guess=1.0)
        90
        >>> budget.last_step(10, used=30.0)  # two seconds per step
        45
        >>> budget.progress(45, last_step=45)
        1.0
    """

    seconds: float
    used: float = 0.0
    reserve: float = 0.0
    readings: list[list[int | float]] = field(default_factory=list)

    def last_step(self, step: int, *, used: float, guess: float = 1.0) -> int:
        """Add a measurement to `readings`, and return the number of the step at which the time will be used up.

        Args:
            step: Number of steps finished so far.
            used: Seconds that they took.
            guess: Seconds per step to assume as long as there is only one measurement.
        """
        self.readings = [*self.readings, [step, used]][-READINGS:]
        (first, since), (last, now) = self.readings[0], self.readings[-1]
        per_step = (now - since) / (last - first) if last > first else guess
        return step + max(0, int((self.seconds - self.reserve - used) / max(per_step, 1e-9)))

    def progress(self, step: int, *, last_step: int) -> float:
        """Estimate which fraction of the time will be used when step `step` ends, from 0 to 1.

        Args:
            step: Number of the step, at or after the last measurement.
            last_step: Number of the last step, for which the result is 1.
        """
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        share = min(1.0, used / self.seconds)
        return share + (1 - share) * (step - read) / max(1, last_step - read)
