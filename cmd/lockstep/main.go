// Command lockstep trains models on several replicas, launches and diagnoses distributed jobs, and measures
// collectives. Run "lockstep help".
package main

import "os"

func main() { os.Exit(run(os.Args[1:])) }
