"""The paired gate: a run against its baseline question by question, asked again where one pass does not settle it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from statistics import NormalDist

from harness.gates.history import Pair, Pass, QuestionHistory, flips_between, pair_up
from harness.gates.permutation import Outcome, law_of_sum
from harness.gates.threshold import Gate, Verdict

FIRST_LOOK_SHARE = 0.1
"""How much of alpha the first pass may spend; the last look has the rest (Bonferroni)."""
CLEAR = 2
"""A run counts as kept once a loss of this many margins is excluded."""
CLEAR_CONFIDENCE = 0.99
"""How surely: at a loss of two margins one run in a hundred may be let go after its first pass."""

NORMAL = NormalDist()


class PairedVerdict(StrEnum):
    """What a paired comparison says about the loss."""

    LOST = "lost"
    KEPT = "kept"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedResult:
    """One look at a run against its baseline; losses are shares of the questions, below 0 where the run is better."""

    verdict: PairedVerdict
    final: bool
    """False where the questions should be asked again up to the last look."""
    questions: int
    passes: int
    loss: float
    p_value: float
    """One-sided, for this look."""
    level: float
    """What the p-value must not exceed at this look; both looks' levels add up to alpha."""
    upper_bound_95: float
    low: float
    """With `high` the two-sided 95% interval of the loss."""
    high: float
    worse: int
    """Questions right less often than in the baseline: with one run on each side, those that went wrong."""
    better: int
    p_value_other_questions: float
    """One-sided, were the questions a sample of many like them: wide, and never what gates."""
    margin: float
    flips_between_runs: float | None
    """Answers that differ between two runs of the baseline; None where it holds one. Far fewer than
    `flips_between_passes` means that its runs were more alike than a run is, and that the p-value is too small."""
    flips_between_passes: float | None


def paired_verdict(
    baseline: Sequence[QuestionHistory],
    passes: Sequence[Pass],
    *,
    alpha: float = 0.001,
    margin: float = 0.005,
    max_repeats: int = 3,
) -> PairedResult:
    """Judge the mean of the passes so far against the baseline.

    There are two looks, after one pass and after `max_repeats`. Raises ValueError at any other number of passes, which
    would be a look that alpha does not pay for, and where nothing can be compared.
    """
    if len(passes) not in (1, max_repeats):
        raise ValueError(f"{len(passes)} passes: they are judged after 1 and after {max_repeats}")
    pairs = pair_up(baseline, passes)
    loss = sum((pair.loss for pair in pairs), Fraction()) / len(pairs)
    level = alpha if max_repeats == 1 else alpha * (FIRST_LOOK_SHARE if len(passes) == 1 else 1 - FIRST_LOOK_SHARE)
    p_value = p_value_of_loss(pairs)
    if p_value <= level and loss > Fraction(str(margin)):
        verdict = PairedVerdict.LOST
    elif loss_bound(pairs, CLEAR_CONFIDENCE) < CLEAR * margin:
        verdict = PairedVerdict.KEPT
    else:
        verdict = PairedVerdict.INCONCLUSIVE
    high = loss_bound(pairs, 0.975)
    return PairedResult(
        verdict=verdict,
        final=verdict is not PairedVerdict.INCONCLUSIVE or len(passes) >= max_repeats,
        questions=len(pairs),
        passes=len(passes),
        loss=float(loss),
        p_value=p_value,
        level=level,
        upper_bound_95=loss_bound(pairs, 0.95),
        low=2 * float(loss) - high,
        high=high,
        worse=sum(pair.loss > 0 for pair in pairs),
        better=sum(pair.loss < 0 for pair in pairs),
        p_value_other_questions=_p_value_other_questions(pairs),
        margin=margin,
        flips_between_runs=flips_between([pair.baseline for pair in pairs]),
        flips_between_passes=flips_between([pair.run for pair in pairs]),
    )


def p_value_of_loss(pairs: Sequence[Pair]) -> float:
    """Test for a loss on these questions, one-sided: the larger of two p-values, so that both nulls must be refuted.

    The first null is that nothing changed, whatever each question's success rate (exact; McNemar's test where both
    sides hold one run). The second is that the run is noisier than the baseline but right as often.
    """
    return max(_p_value_unchanged(pairs), _p_value_noisier(pairs))


def mcnemar(lost: int, gained: int) -> float:
    """Compute McNemar's exact two-sided p-value (McNemar 1947, Psychometrika 12:153); 1 without discordant pairs."""
    n = lost + gained
    ways = sum(math.comb(n, i) for i in range(min(lost, gained) + 1))
    return min(1.0, float(Fraction(2 * ways, 2**n)))


def loss_bound(pairs: Sequence[Pair], confidence: float) -> float:
    """Bound the loss from above, one-sided: loss + z sqrt(V + (z / m)^2).

    V is the variance that the runs of each question show, or its squared loss where a side has one run. The second
    term, m being the fewest runs of a side, is what a score interval adds: without it no discordance at all would
    prove that no loss is possible (docs/statistics.md).
    """
    n, z = len(pairs), NORMAL.inv_cdf(confidence)
    fewest = min(min(pair.baseline.runs, pair.run.runs) for pair in pairs)
    variance = math.fsum(
        float(pair.loss) ** 2 if fewest == 1 else pair.baseline.variance_of_rate + pair.run.variance_of_rate
        for pair in pairs
    )
    loss = math.fsum(float(pair.loss) for pair in pairs)
    return (loss + z * math.sqrt(variance + (z / fewest) ** 2)) / n


def judge_paired(result: PairedResult) -> Gate:
    """Turn the last look into a gate: a loss that is significant and above the margin is a regression."""
    lost = result.verdict is PairedVerdict.LOST
    message = (
        f"loss against the baseline {result.loss:+.4f} over {result.questions} questions and {result.passes} "
        f"pass{'es' if result.passes > 1 else ''} (p = {result.p_value:.2g}, at most {result.upper_bound_95:+.4f} with "
        f"95% confidence; {result.worse} questions worse, {result.better} better): "
    )
    if lost:
        message += f"significant at {result.level:g} and above the margin {result.margin:g}"
    elif result.verdict is PairedVerdict.KEPT:
        message += f"a loss of {CLEAR * result.margin:g} is excluded"
    else:
        message += f"not significant at {result.level:g}, yet a loss of {CLEAR * result.margin:g} is not excluded"
    verdict = Verdict.REGRESSION if lost else Verdict.PASS
    return Gate(name="paired", verdict=verdict, message=message, measured=result.loss, required=result.margin)


def _p_value_unchanged(pairs: Sequence[Pair]) -> float:
    """Deal every question's right answers anew over the runs of both sides, and see how often the loss is as large.

    A question on which the k runs of the baseline came out both ways says less, and counts one k-th.
    """
    unit, most = _unit(pairs), math.lcm(*(pair.baseline.runs for pair in pairs))

    def score(before: QuestionHistory, after: QuestionHistory) -> int:
        return int((before.rate - after.rate) * unit) * (most if before.unanimous else most // before.runs)

    informative = [pair for pair in pairs if pair.informative]
    law = law_of_sum(pair.dealt(score) for pair in informative)
    return law.tail(sum(score(pair.baseline, pair.run) for pair in informative))


def _p_value_noisier(pairs: Sequence[Pair]) -> float:
    """Test the mean loss by the normal law, with no more noise in the losses than the gains show.

    A run that is noisier and right as often gains as much as it loses, so twice the gains' noise is the noise of
    both. Losses must not enter: requests that fail at random are noise too, but of one sign.
    """
    loss = math.fsum(float(pair.loss) for pair in pairs)
    if loss <= 0:
        return 0.0
    if min(min(pair.baseline.runs, pair.run.runs) for pair in pairs) == 1:
        variance = _symmetric(pairs, lambda pair: float(pair.loss) ** 2)
    else:
        variance = math.fsum(pair.baseline.variance_of_rate for pair in pairs)
        variance += _symmetric(pairs, lambda pair: pair.run.variance_of_rate)
    return math.erfc(loss / math.sqrt(2 * variance)) / 2 if variance else 0.0


def _symmetric(pairs: Sequence[Pair], noise: Callable[[Pair], float]) -> float:
    gains = math.fsum(noise(pair) for pair in pairs if pair.loss < 0)
    return min(2 * gains, math.fsum(noise(pair) for pair in pairs))


def _p_value_other_questions(pairs: Sequence[Pair]) -> float:
    """Flip the sign of every question's loss at random (Fisher 1935): McNemar's test where each side has one run."""
    unit = _unit(pairs)
    losses = [int(pair.loss * unit) for pair in pairs if pair.loss]
    law = law_of_sum([Outcome(score=-abs(loss), ways=1), Outcome(score=abs(loss), ways=1)] for loss in losses)
    return law.tail(sum(losses))


def _unit(pairs: Sequence[Pair]) -> int:
    """Find the number by which every loss becomes whole."""
    return math.lcm(*(runs for pair in pairs for runs in (pair.baseline.runs, pair.run.runs)))
