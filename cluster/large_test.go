package cluster

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// variableMax is how many bytes a variable of the environment has at most on Linux, with its name and a zero byte.
const variableMax = 128 << 10

// TestManyHosts: Slurm and Open MPI describe a job of 4,096 hosts in variables that Linux accepts, and every worker
// finds itself in it: hosts of consecutive numbers, and hosts whose names Slurm cannot abbreviate.
func TestManyHosts(t *testing.T) {
	const hosts, each = 4096, 8
	random := rand.New(rand.NewPCG(1, 3))
	var names []string
	for i := range hosts {
		names = append(names, fmt.Sprintf("%c%c-gpu-%04d", 'a'+random.IntN(26), 'a'+random.IntN(26), i))
	}
	for name, list := range map[string]string{"consecutive": "node[0000-4095]", "irregular": strings.Join(names, ",")} {
		first, _, _ := strings.Cut(strings.Replace(list, "[0000-4095]", "0000,", 1), ",")
		for _, worker := range []int{0, 12345, hosts*each - 1} {
			node := worker / each
			slurm := map[string]string{
				"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": list, "SLURM_NODEID": fmt.Sprint(node),
			}
			step := map[string]string{
				"SLURM_PROCID": fmt.Sprint(worker), "SLURM_STEP_NUM_TASKS": fmt.Sprint(hosts * each),
				"SLURM_STEP_NODELIST": list, "SLURM_STEP_TASKS_PER_NODE": fmt.Sprintf("%d(x%d)", each, hosts),
				"SLURM_LOCALID": fmt.Sprint(worker % each),
			}
			mpi := map[string]string{
				"OMPI_COMM_WORLD_RANK": fmt.Sprint(worker), "OMPI_COMM_WORLD_SIZE": fmt.Sprint(hosts * each),
				"OMPI_COMM_WORLD_LOCAL_RANK": fmt.Sprint(worker % each), "OMPI_COMM_WORLD_LOCAL_SIZE": fmt.Sprint(each),
				"PMIX_NAMESPACE": "prterun-head-77@1",
			}
			for launcher, own := range map[string]map[string]string{"srun": step, "mpirun": mpi} {
				variables := map[string]string{}
				for _, part := range []map[string]string{slurm, own} {
					for key, value := range part {
						if variables[key] = value; len(key)+len(value)+2 > variableMax {
							t.Fatalf("%s has %d bytes", key, len(value))
						}
					}
				}
				job, err := Discover(Discovery{Getenv: env(variables)})
				if err != nil {
					t.Fatalf("%s, %s hosts, worker %d: %v", launcher, name, worker, err)
				}
				if job.Worker != worker || job.Workers != hosts*each || job.LocalWorker != worker%each ||
					job.LocalWorkers != each || !strings.HasPrefix(job.Store, "tcp://"+first+":") {
					t.Errorf("%s, %s hosts, worker %d: worker %d of %d, %d of %d on its host, store %s of %s", launcher, name, worker,
						job.Worker, job.Workers, job.LocalWorker, job.LocalWorkers, job.Store, first)
				}
				if text := fmt.Sprint(job); len(text) > 8<<10 {
					t.Errorf("%s, %s hosts: the description has %d bytes", launcher, name, len(text))
				}
			}
		}
	}
}
