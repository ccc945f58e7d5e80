"""Rules of the leak suspicion: what is one, and the growths that are none."""

import math
import random
from itertools import pairwise

import pytest

from ddp_runner.core.memory_leak import SAMPLES_MAX, LeakWindow, suspected_leak
from ddp_runner.core.settings import MemorySettings

MB = 1_000_000
SETTINGS = MemorySettings()  # a window of 1000 steps, 50 MB per 1000 steps
BASE = 500 * MB


def samples(shape, *, spacing=16, count=SAMPLES_MAX):
    return [(i * spacing, int(BASE + shape(i * spacing))) for i in range(count)]


def noise(amplitude, seed=7):
    draw = random.Random(seed)
    return lambda _step: draw.uniform(0, amplitude)


@pytest.mark.parametrize("rate_mb", [60, 100, 1000])
def test_steady_growth_is_suspected_with_its_rate(rate_mb):
    """A leak is reported with a rate within a tenth of the real one."""
    found = suspected_leak(samples(lambda step: step * rate_mb * MB / 1000), SETTINGS)
    assert found is not None
    assert found.since_step == 0
    assert found.rate_bytes_per_1000_steps == pytest.approx(rate_mb * MB, rel=0.1)


def leaking(jitter):
    return lambda step: step * 0.1 * MB + jitter(step)


def test_a_leak_under_a_tenth_as_much_noise_is_suspected():
    """Noise of ordinary allocation does not hide a leak."""
    for seed in range(20):
        found = suspected_leak(samples(leaking(noise(10 * MB, seed))), SETTINGS)
        assert found is not None
        assert found.rate_bytes_per_1000_steps == pytest.approx(100 * MB, rel=0.25)


def test_a_leak_that_grows_by_steps_is_suspected():
    """An allocator hands out memory in lumps; a lump in each block is still a leak."""
    assert suspected_leak(samples(lambda step: step // 100 * 10 * MB), SETTINGS) is not None


def test_a_leak_with_a_sawtooth_on_top_is_suspected():
    """The floor of the sawtooth rises, so it is a leak."""
    shape = lambda step: step * 0.2 * MB + step % 64 * MB  # noqa: E731
    assert suspected_leak(samples(shape), SETTINGS) is not None


CONTROLS = {
    "flat": lambda _step: 0,
    "slower than the setting": lambda step: step * 40_000,
    "shrinking": lambda step: -step * 0.1 * MB,
    "one-off jump": lambda step: 400 * MB if step > 500 else 0,
    "jump at the start": lambda step: 400 * MB if step > 32 else 0,
    "two jumps": lambda step: (step > 300) * 200 * MB + (step > 700) * 200 * MB,
    "sawtooth, short": lambda step: step % 100 * 3 * MB,
    "sawtooth, half a window": lambda step: step % 500 * MB,
    "sawtooth, uneven": lambda step: step % 370 * MB,
    "warm-up, then flat": lambda step: min(step, 500) * MB,
    "warm-up, late plateau": lambda step: min(step, 800) * MB,
    "warm-up that settles": lambda step: 500 * MB * (1 - math.exp(-step / 300)),
    "warm-up that settles slowly": lambda step: 500 * MB * (1 - math.exp(-step / 900)),
    "one spike": lambda step: 900 * MB if step == 512 else 0,
}


@pytest.mark.parametrize("shape", CONTROLS.values(), ids=CONTROLS)
def test_growth_that_every_run_has_is_not_suspected(shape):
    """Control: sawtooth, jump, warm-up and slow growth must not trigger."""
    assert suspected_leak(samples(shape), SETTINGS) is None


def test_noise_alone_is_not_suspected():
    """Control: noise, and a random walk back and forth, must not trigger."""
    for seed in range(50):
        assert suspected_leak(samples(noise(300 * MB, seed)), SETTINGS) is None


def test_too_few_samples_decide_nothing():
    """Control: fifteen samples are no window, however steep."""
    assert suspected_leak(samples(lambda step: step * MB, count=15), SETTINGS) is None


def feed(window, shape, *, steps, interval=10):
    return [
        (step, found)
        for step in range(interval, steps + 1, interval)
        if (found := window.observe(step=step, size_bytes=int(BASE + shape(step))))
    ]


def test_a_lasting_leak_is_reported_once_per_window():
    """Ten windows of leak are reported ten times at most, and at least eight."""
    reports = feed(LeakWindow(SETTINGS), lambda step: step * 0.1 * MB, steps=10_000)
    assert 8 <= len(reports) <= 10
    assert all(b - a >= 950 for (a, _), (b, _) in pairwise(reports))


def test_the_window_holds_a_bounded_number_of_samples():
    """Memory of the watch itself does not grow with the run."""
    window = LeakWindow(SETTINGS)
    feed(window, lambda _step: 0, steps=100_000, interval=1)
    assert len(window) <= SAMPLES_MAX + 1


def test_a_window_of_rare_checks_is_stretched_until_it_can_be_judged():
    """A check every 200 steps still finds a leak with a window setting of 20 steps."""
    settings = MemorySettings(leak_window_steps=20, memory_check_interval=200)
    assert feed(LeakWindow(settings), lambda step: step * 0.1 * MB, steps=8000, interval=200)


def test_warm_up_followed_by_a_flat_run_is_never_reported():
    """Control: as the window slides over the end of warm-up, no position of it triggers."""
    for warm_up_steps in (100, 300, 600, 800):
        shape = lambda step, end=warm_up_steps: min(step, end) * MB  # noqa: E731
        assert feed(LeakWindow(SETTINGS), shape, steps=5000) == []


def test_a_rollback_to_an_earlier_step_starts_a_new_window():
    """Steps that go backwards never mix old samples with new ones."""
    window = LeakWindow(SETTINGS)
    feed(window, lambda step: step * 0.1 * MB, steps=900)
    assert window.observe(step=100, size_bytes=BASE) is None
    assert len(window) == 1
