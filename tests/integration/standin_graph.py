"""A graph of stand-ins: one frontend, some workers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from graphs.graph import Component
from wavepp_worker.config.schema import Section


class WorkerSettings(Section, frozen=True):
    mode: Literal["serve", "refuse", "stubborn", "parent"] = "serve"


class FrontSettings(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1)] = 8000


Worker = Component(
    name="Worker",
    does="stands in for a worker",
    config_type=WorkerSettings,
    module="tests.integration.standin",
    arguments=lambda _settings, file: (file,),
    model_name=lambda _settings: "stand-in",
)

Frontend = Component(
    name="Frontend",
    does="stands in for the frontend",
    config_type=FrontSettings,
    module="tests.integration.standin",
    arguments=lambda settings, _file: (f"{settings.host}:{settings.port}",),
    address=lambda settings: (settings.host, settings.port),
    is_frontend=True,
    needs=(Worker,),
)
