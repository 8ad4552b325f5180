"""Writes the reference pages: see `infra.cli.docs.pages`."""

from infra.cli.docs.pages import main

main()
