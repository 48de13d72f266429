"""How long things take here and now, learned from what they took: shape times pace.

The *shape* says how the time depends on the size of a job: a non-negative combination of features
(for example 1 and the number of bytes). It is learned slowly, from jobs of all sizes that were seen
lately, so a run of equal jobs does not make it forget the others. The *pace* multiplies the shape:
the median of the last five ratios of measured to expected time. Two outliers among five change
nothing, and a change of speed is followed when three measurements have shown it. Why this is so:
docs/cost-model.md. How fast a queue moves is learned from its admissions (`QueuePace`).

Pure: no clock, no threads, no I/O.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PACE_WINDOW = 5
"""Measurements that the pace is the median of."""

_STRATUM_BASE = 4.0  # jobs whose features differ by less than this factor count as of one size
_MAX_STRATA = 32
_SAMPLES_A_STRATUM = 3
# A measurement that is off by more says something of the pace, or nothing, but not of the shape.
_BAND = 1.5
_RIDGE = 1e-3
_ROUNDS = 2
_MAIN = 1  # index of the main feature, behind the constant
# So many admissions are remembered, and so few say nothing.
_ADMISSIONS, _TOO_FEW_ADMISSIONS = 32, 4

Row = tuple[Sequence[float], float]
"""Features of a job, and what it took."""


@dataclass
class _Stratum:
    """The last jobs of about one size."""

    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=_SAMPLES_A_STRATUM))
    refused: int = 0  # in a row

    def middle(self) -> Row:
        """The job whose time a unit of the main feature is the median."""
        ordered = sorted(self.rows, key=lambda row: row[1] / (row[0][_MAIN] or 1.0))
        return ordered[(len(ordered) - 1) // 2]


class TimeEstimator:
    """Expected seconds of a job from its features. One thread at a time; every call is O(1).

    Of a job's 2 or 3 features the first is the constant 1; the second, the main one, explains the
    times where the third cannot be told from it.
    """

    def __init__(self) -> None:
        self._strata: OrderedDict[tuple[int, ...], _Stratum] = OrderedDict()
        self._ratios: deque[float] = deque(maxlen=PACE_WINDOW)
        self._shape: list[float] | None = None  # None: to be fitted
        self._fit: tuple[list[Row], list[float]] | None = None  # the last one: of what, and it
        self._present: list[float] | None = None  # shape times pace; None: to be multiplied
        self.pace = 1.0
        """How much slower than the shape says things are now; 1 until that is known."""
        self.num_samples = 0

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Learns from one job.

        Args:
            features: finite and not negative.
            seconds: what it took; jobs of no or unknown duration are ignored.
        """
        x = tuple(features)
        if not (seconds > 0 and math.isfinite(seconds) and x[_MAIN] > 0):
            return
        self.num_samples += 1
        key = tuple(round(math.log(max(value, 1.0), _STRATUM_BASE)) for value in x[1:])
        stratum = self._strata.get(key)
        if stratum is None:
            stratum = self._strata[key] = _Stratum()
            if len(self._strata) > _MAX_STRATA:
                self._strata.popitem(last=False)
            self._accept(stratum, x, seconds)
            return
        self._strata.move_to_end(key)
        shape = self._shape_time(x)
        self._ratios.append(seconds / shape)
        self.pace, self._present = _log_median(self._ratios), None
        off = seconds / (shape * self.pace)
        if 1 / _BAND <= off <= _BAND or stratum.refused >= PACE_WINDOW:
            self._accept(stratum, x, seconds)
        else:
            stratum.refused += 1

    def seconds(self, features: Sequence[float]) -> float | None:
        """Expected time of a job; None before the first measurement."""
        coefficients = self.coefficients
        return None if coefficients is None else max(_dot(coefficients, features), 1e-9)

    @property
    def largest(self) -> float:
        """The most of the main feature that a job had, of those remembered; 0 before the first."""
        rows = (row for stratum in self._strata.values() for row in stratum.rows)
        return max((features[_MAIN] for features, _ in rows), default=0.0)

    @property
    def coefficients(self) -> list[float] | None:
        """Seconds a unit of each feature, at the present pace; None before the first."""
        if self._present is None and self._strata:
            self._present = [value * self.pace for value in self._fitted()]
        return self._present

    def _accept(self, stratum: _Stratum, x: tuple[float, ...], seconds: float) -> None:
        stratum.rows.append((x, seconds / self.pace))
        stratum.refused = 0
        self._shape = self._present = None

    def _shape_time(self, features: Sequence[float]) -> float:
        return max(_dot(self._fitted(), features), 1e-9)

    def _fitted(self) -> list[float]:
        if self._shape is None:
            rows = [stratum.middle() for stratum in self._strata.values()]
            # A stratum's middle is often the same as before.
            if self._fit is None or self._fit[0] != rows:
                self._fit = rows, _fit_evenly(rows)
            self._shape = self._fit[1]
        return self._shape


def _fit_evenly(rows: Sequence[Row]) -> list[float]:
    """Least squares that minds an estimate of twice the time as much as one of half of it.

    Relative errors to the measured time alone would favour low estimates.
    """
    fitted = fit_non_negative(rows)
    for _ in range(_ROUNDS):
        weights = [y / max(_dot(fitted, x), 1e-3 * y) for x, y in rows]
        fitted = fit_non_negative(rows, weights=weights)
    return fitted


def fit_non_negative(
    rows: Sequence[Row],
    ridge: float = _RIDGE,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Least squares of relative errors with coefficients that are not negative.

    Minimises `sum_i w_i ((x_i . c) / y_i - 1)^2` over `c >= 0`, by trying each set of features that
    may be above zero: at most seven for three. All but the main feature carry a small penalty, so
    that what the data leave open goes to the main one.

    Args:
        rows: features and measured value, both of one row; values above 0.
        ridge: the penalty.
        weights: of the rows; 1 where not given.

    Returns:
        One coefficient a feature.
    """
    num = len(rows[0][0])
    weights = weights or [1.0] * len(rows)
    scaled = [
        [math.sqrt(w) * value / y for value in x] + [math.sqrt(w)]
        for (x, y), w in zip(rows, weights, strict=True)
    ]
    columns = list(zip(*scaled, strict=True))
    norm = [math.sqrt(_dot(column, column)) for column in columns[:num]]
    used = [i for i in range(num) if norm[i]]
    gram = [[0.0] * num for _ in range(num)]
    for i, j in itertools.product(used, used):
        gram[i][j] = _dot(columns[i], columns[j]) / (norm[i] * norm[j])
    target = [_dot(columns[i], columns[num]) / norm[i] if norm[i] else 0.0 for i in range(num)]
    for i in used:
        gram[i][i] += 0.0 if i == _MAIN else ridge
    best, best_value = [0.0] * num, math.inf
    for size in range(1, len(used) + 1):
        for subset in itertools.combinations(used, size):
            part = _solve(
                [[gram[i][j] for j in subset] for i in subset], [target[i] for i in subset]
            )
            if part is None or min(part) < 0:
                continue
            value = -sum(target[i] * c for i, c in zip(subset, part, strict=True))
            if value < best_value - 1e-12:
                best_value, best = value, [0.0] * num
                for i, c in zip(subset, part, strict=True):
                    best[i] = c / norm[i]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting, in place; None for a singular matrix."""
    num = len(right)
    for column in range(num):
        pivot = max(range(column, num), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        right[column], right[pivot] = right[pivot], right[column]
        for row in range(column + 1, num):
            factor = matrix[row][column] / matrix[column][column]
            for other in range(column, num):
                matrix[row][other] -= factor * matrix[column][other]
            right[row] -= factor * right[column]
    result = [0.0] * num
    for row in reversed(range(num)):
        known = sum(matrix[row][other] * result[other] for other in range(row + 1, num))
        result[row] = (right[row] - known) / matrix[row][row]
    return result


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return float(sum(map(operator.mul, left, right)))


def _log_median(values: Sequence[float]) -> float:
    return math.exp(statistics.median(math.log(value) for value in values))


class PrefillEstimator:
    """Seconds of a prefill by its new tokens and what lies before them.

    The linear layers work once a token. Attention works once for each pair of a new token and a
    token that it sees: `n (p + n / 2)` for n new tokens behind p. So `t = a + b n + c n (p + n/2)`
    for one request; of a batch the features add up, and `a` is paid once.
    """

    def __init__(self) -> None:
        self._time = TimeEstimator()

    def add(self, work: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learns from a batch: (new tokens, tokens before them) of each request."""
        self._time.add(prefill_features(work), seconds)

    def seconds(self, new_tokens: int, prefix_tokens: int) -> float | None:
        """Expected time of one request alone; None before the first measurement."""
        return self._time.seconds(prefill_features([(new_tokens, prefix_tokens)]))

    def batch_seconds(self, work: Sequence[tuple[int, int]]) -> float | None:
        """Expected time of a batch."""
        return self._time.seconds(prefill_features(work))

    @property
    def coefficients(self) -> list[float] | None:
        """Seconds a batch, a new token, a pair of tokens."""
        return self._time.coefficients

    @property
    def most_tokens(self) -> float:
        """The most new tokens of a batch that was measured; 0 before the first."""
        return self._time.largest

    @property
    def num_samples(self) -> int:
        """Batches seen."""
        return self._time.num_samples


def prefill_features(work: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """The features of a batch: 1, new tokens, pairs of tokens that attention works on."""
    tokens = sum(new for new, _ in work)
    pairs = sum(new * (before + new / 2) for new, before in work)
    return 1.0, float(tokens), float(pairs)


class TransferEstimator:
    """Latency and bandwidth of a tier: `t = latency + bytes / bandwidth`."""

    def __init__(self) -> None:
        self._time = TimeEstimator()

    def add(self, num_bytes: int, seconds: float) -> None:
        """Learns from one transfer."""
        self._time.add((1.0, float(num_bytes)), seconds)

    def seconds(self, num_bytes: float) -> float | None:
        """Expected time of a transfer; None before the first measurement, 0 for no bytes."""
        return self._time.seconds((1.0, num_bytes)) if num_bytes > 0 else 0.0

    @property
    def latency_s(self) -> float | None:
        """Seconds that every transfer takes, whatever its size."""
        coefficients = self._time.coefficients
        return None if coefficients is None else coefficients[0]

    @property
    def seconds_per_byte(self) -> float | None:
        """The inverse of the bandwidth."""
        coefficients = self._time.coefficients
        return None if coefficients is None else coefficients[1]

    @property
    def most_bytes(self) -> float:
        """The most bytes of a transfer that was measured; 0 before the first."""
        return self._time.largest

    @property
    def num_samples(self) -> int:
        """Transfers seen."""
        return self._time.num_samples


class StepEstimator:
    """Median of the last five durations of a step that varies little: a decode step."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=PACE_WINDOW)

    def add(self, seconds: float) -> None:
        """Learns from one step."""
        if seconds > 0 and math.isfinite(seconds):
            self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        """Expected duration of the next; None before the first."""
        return statistics.median(self._last) if self._last else None


class QueuePace:
    """How fast a waiting queue moves, whatever holds it up: from its last admissions.

    The prefills of those before it are the least that a request waits for. Where the batch has no
    place or the device no room, it waits for answers to end, which no sum of prefills knows: what
    can be read meanwhile would be thought to come too late.
    """

    def __init__(self) -> None:
        # Time for which a request was held for its own pages does not count: a queue that waits for
        # its loads must not make more of them look free.
        self._held_s = 0.0
        self._admissions: deque[float] = deque(maxlen=_ADMISSIONS)

    def admitted(self, now_s: float, held_s: float) -> None:
        """A request left the queue to run.

        Args:
            now_s: now.
            held_s: for how long it was held, at its turn, for its pages.
        """
        self._held_s += held_s
        self._admissions.append(now_s - self._held_s)

    def rest(self) -> None:
        """Nobody waits any more: what comes next does not wait for those that ran."""
        self._admissions.clear()

    def turn_in_s(self, num_ahead: int, now_s: float) -> float:
        """Seconds until a request runs that so many others are before; 0 where nothing is known."""
        if len(self._admissions) < _TOO_FEW_ADMISSIONS:
            return 0.0
        first_s, last_s = self._admissions[0], self._admissions[-1]
        between_s = (last_s - first_s) / (len(self._admissions) - 1)
        return max(0.0, (num_ahead + 1) * between_s - (now_s - self._held_s - last_s))
