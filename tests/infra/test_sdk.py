"""What plugins import."""

import infra.sdk as headrace


def test_every_name_a_plugin_needs_is_there_and_says_what_it_is() -> None:
    assert set(headrace.__all__) >= {
        *("Drop", "Experience", "Feedback", "Message", "Score", "Span", "Task", "processor", "feedback", "score")
    }
    for name in headrace.__all__:
        assert getattr(headrace, name).__doc__


def test_the_readme_s_processor_is_all_there_is_to_write() -> None:
    @headrace.processor(version=1)
    def not_trivial(experience: headrace.Experience, *, min_tokens: int = 8) -> headrace.Experience | headrace.Drop:
        return experience if experience.num_sampled >= min_tokens else headrace.Drop("too short")

    one = headrace.Experience(id="t.0.0-0-0", group="t.0", episode=0, group_size=1, num_tokens=0, spans=())
    assert not_trivial(one) == headrace.Drop("too short")
