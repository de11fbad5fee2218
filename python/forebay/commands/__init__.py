"""The parts of the `forebay` command, imported when they are asked for."""
