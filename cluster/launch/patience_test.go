package launch

import "time"

// patience bounds waits for events that must happen: a slow machine is no failure.
const patience = 5 * time.Minute
