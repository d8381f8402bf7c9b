package launch

import "time"

// patience is for what must come: a machine that is slow is not wrong.
const patience = 5 * time.Minute
