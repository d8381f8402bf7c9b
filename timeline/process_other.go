//go:build !unix

package timeline

import "time"

func processorTime() time.Duration { return 0 }
