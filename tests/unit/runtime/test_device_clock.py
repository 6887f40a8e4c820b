"""Host times of a device's waves, from durations alone."""

from __future__ import annotations

import pytest

from wavepp_worker.runtime.device_clock import DeviceClock


def test_the_first_wave_starts_when_it_was_launched() -> None:
    at, _ = DeviceClock().place(launched_at=10.0, seen_at=13.0, since_last_s=99.0, busy_s=1.0)
    assert at == 10.0


def test_a_wave_that_was_launched_early_follows_the_one_before() -> None:
    clock = DeviceClock()
    clock.place(launched_at=10.0, seen_at=13.0, since_last_s=0.0, busy_s=2.0)
    assert clock.place(launched_at=10.5, seen_at=15.0, since_last_s=0.25, busy_s=1.0) == (
        12.25,
        13.25,
    )


def test_a_wave_after_a_pause_starts_no_earlier_than_its_launch() -> None:
    """Its distance, as measured, would put it earlier: the first wave was placed too early."""
    clock = DeviceClock()
    clock.place(launched_at=10.0, seen_at=13.0, since_last_s=0.0, busy_s=2.0)
    assert clock.place(launched_at=20.0, seen_at=22.0, since_last_s=7.5, busy_s=1.0) == (20.0, 21.0)


def test_no_wave_ends_after_its_fence_was_seen() -> None:
    clock = DeviceClock()
    clock.place(launched_at=10.0, seen_at=12.5, since_last_s=0.0, busy_s=2.0)
    assert clock.place(launched_at=12.0, seen_at=14.0, since_last_s=1.5, busy_s=1.0) == (13.0, 14.0)


def test_waves_do_not_overlap_even_if_the_clocks_disagree() -> None:
    clock = DeviceClock()
    clock.place(launched_at=10.0, seen_at=12.0, since_last_s=0.0, busy_s=2.0)
    assert clock.place(launched_at=10.0, seen_at=12.1, since_last_s=0.0, busy_s=1.0) == (12.0, 12.1)


@pytest.mark.parametrize("drift", [0.999, 1.0, 1.001])
def test_a_drifting_device_is_never_off_by_more_than_the_slack(drift: float) -> None:
    """Six minutes of waves of 50 ms, launched one ahead; the fence is seen 0.2 ms late."""
    clock, wave_s, late_s = DeviceClock(), 0.05, 0.0002
    for number in range(7_200):
        true_at = number * wave_s
        at, ended_at = clock.place(
            launched_at=true_at - wave_s,
            seen_at=true_at + wave_s + late_s,
            since_last_s=0.0,
            busy_s=wave_s * drift,
        )
        assert abs(at - true_at) <= wave_s + late_s
        assert at <= ended_at <= true_at + wave_s + late_s
