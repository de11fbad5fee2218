"""What people see of an engine or a daemon: reports, `forebay status`, `forebay top`, the page."""
