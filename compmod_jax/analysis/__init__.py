"""Pictures and reports: reads what the rest of the library makes; nothing imports it."""
