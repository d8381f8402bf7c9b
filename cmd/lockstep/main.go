// Command lockstep trains models on several replicas, launches and diagnoses distributed jobs, and measures
// collectives. Run "lockstep help".
package main

import (
	"os"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/root"
)

func main() { os.Exit(root.Run(os.Args[1:])) }
