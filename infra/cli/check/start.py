"""What `headrace check` tries of a role's start: the model's configuration and tokenizer, secrets, options of engines.

Nothing is started, and no weights are read.
"""

import importlib.util
import inspect
from collections.abc import Sequence

from infra.cli.run.roles import implied_options, webhooks_of
from infra.cli.settings import Settings
from infra.settings.config import Use
from infra.settings.plugin import check_names, find
from schemas.errors import ConfigError
from streams.sources.event import EventSource
from streams.sources.langfuse import keys_of


def check_model(settings: Settings) -> tuple[str, list[str]]:
    """How the policy's model writes calls and thoughts, "" where it was not opened; and what a person should know of it. Raises
    ConfigError for a model that is not there, and for parsers that are not.
    """
    path = settings.model_path
    if not path:
        return "", ["policy.model: missing: explore, serve and train do not start without"]
    if importlib.util.find_spec("transformers") is None:
        return "", ["policy.model is not opened: that needs transformers, which is not installed here"]
    from actors.gateway.answering.parsers import answer_parser
    from infra.model.model import context_tokens, load_tokenizer

    try:
        context_tokens(path)
        tokenizer = load_tokenizer(path, settings.policy.template, settings.policy.parsers)
    except ConfigError as error:
        raise ConfigError(f'policy.model: got "{settings.policy.model}": {error}') from error
    parser = answer_parser(tokenizer)
    if tokenizer.writing.chosen:
        parser.prepare()
    why = "by [policy]" if tokenizer.writing.chosen else "by the chat template"
    return f"{tokenizer.writing.shown}, {why}", [f"policy: {parser.refusal}"] if parser.refusal else []


def check_secrets(settings: Settings, sources: Sequence[EventSource]) -> None:
    """What the gateway and the stream workers read as secrets for feedback. Raises ConfigError."""
    if settings.gateway is not None:
        webhooks_of(settings)
    for source in sources:
        if source.langfuse is not None:
            keys_of(source)


def check_engine(settings: Settings, use: Use, where: str) -> list[str]:
    """Find an engine and compare its options with those it takes; what cannot be compared here. Raises ConfigError."""
    found = find(use.use, where)
    implied = implied_options(settings, use)
    takes = inspect.signature(found).parameters if callable(found) else {}
    options = {**implied, **use.options}
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        check_names(options, takes, where.removesuffix(".use"))
        return []
    check = getattr(found, "check_options", None)
    rest = {name: value for name, value in use.options.items() if name not in takes}
    if check is None or not rest or check(rest):
        return []
    return [f"{where.removesuffix('.use')}.options: {', '.join(sorted(rest))} not checked: vLLM is not installed here"]
