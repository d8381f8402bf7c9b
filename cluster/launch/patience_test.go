package launch

import "time"

// patience bounds waits for events that must happen: a slow machine must not fail a test.
const patience = 5 * time.Minute
