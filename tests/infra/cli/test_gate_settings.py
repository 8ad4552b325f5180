"""What the master is given of the settings of other parts."""

import msgspec

from actors.config import GateConfig, MasterConfig, PeopleConfig
from infra.cli.settings import Settings
from streams.config import FeedbackConfig, From, StreamsConfig


def test_the_file_has_every_table_of_the_streams_wing_with_its_type_and_default() -> None:
    of_file = {one.name: one for one in msgspec.structs.fields(Settings)}
    for table in msgspec.structs.fields(StreamsConfig):
        assert of_file[table.name] == table
    assert Settings(app="bot").streams() == StreamsConfig()


def test_a_word_of_people_counts_as_long_as_a_session_and_any_feedback_are_waited_for_unless_said_otherwise() -> None:
    heard = From(webhook="/v1/feedback")
    feedback = tuple(
        FeedbackConfig(name=name, use="a:b", from_=heard, window=window) for name, window in (("a", "90m"), ("b", "1h"))
    )
    said = MasterConfig(gate=GateConfig(people=PeopleConfig(rating_window="2h")))
    minutes = 90 + 5  # of a session's silence
    assert Settings(app="a", feedback=feedback).gate().gate.people.rating_window == f"{minutes * 60_000}ms"
    assert Settings(app="a", feedback=feedback, master=said).gate().gate.people.rating_window == "2h"
    assert Settings(app="a").gate().gate.people.rating_window == "0s"
