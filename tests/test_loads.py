"""Code is imported by its name only where an operator wrote the name."""

import re

from tests.test_architecture import PACKAGES, ROOT, text_of

# Who calls the plugin loader, and which setting of the operator's own file (or which flag) names what it loads.
LOADS = {
    "actors/rollout/environment.py": "[explore] options: environment",
    "actors/rollout/environments/gymnasium.py": "[explore] options: environment",
    "actors/rollout/environments/openenv.py": "[explore] options: environment",
    "actors/gateway/serve.py": "[[gateway.processor]]",
    "actors/program/workflow.py": "[explore] options: use",
    "actors/rollout/tool.py": "[explore] options: tools",
    "actors/rollout/workflow.py": "[explore] workflow, [explore.workflows]",
    "actors/rollout/workflows/interact.py": "[explore] options: environment, agent",
    "infra/log/access.py": "[kafka] sasl_token",
    "infra/chain/insert.py": "[[processor]], [[score]], [reward] use",
    "infra/cli/check/check.py": "what the roles load",
    "infra/cli/connect.py": "[store] use",
    "infra/cli/docs.py": "its own",
    "infra/cli/data/load.py": "--use",
    "infra/cli/run/roles.py": "[engine], [gateway] engine, [trainer] learner",
    "infra/cli/demo/demo.py": "its own",
    "streams/sources/source.py": "[[feedback]]",
    "trainer/learners/learner.py": "[trainer] learner, of an archive after learner.foreign_names",
    "trainer/losses/loss.py": "[trainer.lanes], of an archive after learner.foreign_names",
}


def test_code_is_imported_by_name_only_where_an_operator_wrote_the_name() -> None:
    """A new caller belongs into the table, with who names what it loads; a record, a row or an object never may."""
    callers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"from infra\.settings\.plugin import [^\n]*\b(load|find)\b", text_of(path))
    }
    assert callers == set(LOADS)
    importers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"import_module\(|__import__\(", text_of(path))
    }
    # What these import is of this repository, and named in the same file.
    own = {"infra/sdk/headrace/__init__.py", "infra/cli/main.py"}
    assert importers == {"infra/settings/plugin.py", "streams/scores/code_child.py", *own}
