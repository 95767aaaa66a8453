"""Our ops behind the extension points of other engines, which load them by entry points; never imported by us."""
