"""The list of all targets, for tests, campaigns and replays."""

from tests.fuzz import (
    batch_folder,
    checkpoints,
    encoded,
    inputs,
    labelled,
    page,
    pictures,
    records,
    requests,
    training,
    wire,
)
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for room in (
        batch_folder,
        pictures,
        records,
        inputs,
        labelled,
        checkpoints,
        encoded,
        requests,
        page,
        training,
        wire,
    )
    for target in room.TARGETS
}
