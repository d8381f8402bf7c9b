package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/pmi"
)

// The commands of launchers that the code refers to.
const (
	hydra      = "hydra_pmi_proxy"
	horovodrun = "horovodrun"
)

// horovodSource is horovodrun, with Gloo or MPI under it.
var horovodSource = source{
	name: horovodrun, key: "horovod", known: "HOROVOD_RANK", depth: launcher,
	detect: func(d *Discovery) bool { return d.env("HOROVOD_RANK") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("HOROVOD_RANK"), r.workers("HOROVOD_SIZE")
		r.local(j, "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
		r.storeMPI(j, "", horovodrun)
	},
}

// openMPISource is Open MPI's mpirun, of version 4 (ORTE) and 5 (PRRTE).
var openMPISource = source{
	name: "Open MPI", key: "openmpi", known: "OMPI_COMM_WORLD_RANK", depth: insideAllocation,
	detect: func(d *Discovery) bool { return d.env("OMPI_COMM_WORLD_RANK") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("OMPI_COMM_WORLD_RANK"), r.workers("OMPI_COMM_WORLD_SIZE", "OMPI_WORLD_SIZE")
		r.local(j, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
		space := r.text("PMIX_NAMESPACE")
		if space != "" {
			j.ID = "openmpi-" + space
		}
		r.storeMPI(j, space, "mpirun", "orterun", "mpiexec", "prterun", "prte", "prted", "orted")
	},
	hint: func(r *reading) string {
		if role := r.d.env("K_MPI_JOB_ROLE"); role != "" {
			return "this is the " + role + " of a Kubeflow MPIJob; the workers are what mpirun starts"
		}
		return ""
	},
}

// pmiSource is MPICH's and Intel MPI's Hydra, or another launcher with PMI.
var pmiSource = source{
	name: "MPICH (PMI)", key: "pmi", known: "PMI_RANK or PMI_ID", depth: insideAllocation,
	detect: func(d *Discovery) bool { return d.env("PMI_RANK") != "" || d.env("PMI_ID") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("PMI_RANK", "PMI_ID"), r.workers("PMI_SIZE")
		r.local(j, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
		id := r.text("PMI_JOBID") // Slurm's
		if id != "" {
			j.ID, j.Host = "pmi-"+id, r.text("SLURMD_NODENAME")
		}
		r.storeMPI(j, id, hydra, "pmi_proxy")
		// Several hosts, or a launcher that is not known: worker 0 publishes the address of its store in the
		// launcher's key-value space.
		if fd := r.d.env(pmi.EnvFD); fd != "" && !j.Hosted {
			r.note(pmi.EnvFD, fd)
			j.Store, j.NoStore = StorePMI, ""
		}
	},
}

// storeMPI sets the store of a job whose launcher passes no addresses. On one host that is a folder named
// after the launcher's process. In a Slurm allocation it is the allocation's first host, where mpirun puts
// rank 0. Otherwise the user must set it.
func (r *reading) storeMPI(j *Job, job string, launchers ...string) {
	if j.LocalWorkers > 0 && j.LocalWorkers == j.Workers {
		process, err := r.d.launcher(launchers)
		if err != nil {
			j.NoStore = err.Error() + ": " + storeRemedy
			return
		}
		name := process
		if job != "" {
			name = job + "-" + process
		}
		j.Store, j.Hosted, j.StoreTemporary = fileStore(filepath.Join(r.d.Folder, fileName(name))), true, true
		if j.ID == "" {
			j.ID = process
		}
		return
	}
	j.NoStore = "the launcher passes no addresses between hosts: " + storeRemedy + " (mpirun -x " + EnvStore +
		"=…, mpiexec -genv " + EnvStore + " …)"
	if r.d.env("SLURM_JOB_NODELIST") == "" || r.d.env("SLURM_JOB_ID") == "" {
		return
	}
	switch {
	case launchers[0] == horovodrun: // which may have other hosts
	case launchers[0] == hydra && job != "": // by srun --mpi=pmi2
		r.slurmStore(j, "SLURM_STEP_NODELIST", "SLURM_JOB_ID", r.text("SLURM_STEP_ID"))
	default: // the step's number is unsuitable: some processes that mpirun starts are in no step
		r.slurmStore(j, "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "")
	}
}

// fileName replaces characters that are unsuitable for a file's name.
func fileName(s string) string {
	return strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-._", c) {
			return c
		}
		return '_'
	}, s)
}

// launcher returns a unique name for the process that started the workers of this host: its command, its
// number, its start time and the machine's boot id. It is the nearest ancestor with one of these commands.
func (d *Discovery) launcher(commands []string) (string, error) {
	boot, err := d.ReadFile(bootFile)
	if err != nil {
		return "", fmt.Errorf("this system does not show who started the process")
	}
	pid := d.PID
	for range 64 { // ancestors
		text, err := d.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			break
		}
		p, ok := parseStat(text)
		if !ok {
			break
		}
		name, _, _ := strings.Cut(p.command, ".") // mpirun.openmpi
		if slices.Contains(commands, name) {
			id, _, _ := strings.Cut(strings.TrimSpace(string(boot)), "-")
			return fmt.Sprintf("%s-%d-%s-%s", name, pid, p.started, id), nil
		}
		if p.parent <= 1 {
			break
		}
		pid = p.parent
	}
	return "", fmt.Errorf("none of %s is among the processes that started this one", strings.Join(commands, ", "))
}

// LauncherGone reports whether a folder's name is one that [Discover] has made for the workers of one host,
// and the launcher that it is named after has ended: no process of that launcher will join on this host any
// more.
func LauncherGone(name string) bool {
	m := launched.FindStringSubmatch(name)
	if m == nil {
		return false
	}
	pid, started, boot := m[1], m[2], m[3]
	now, err := ReadFile(bootFile)
	if err != nil {
		return false // unknown
	}
	if id, _, _ := strings.Cut(strings.TrimSpace(string(now)), "-"); id != boot {
		return true
	}
	text, err := ReadFile("/proc/" + pid + "/stat")
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	p, ok := parseStat(text)
	return err == nil && ok && p.started != started
}

// launched matches the end of a folder's name that contains launcher's result.
var launched = regexp.MustCompile(`^(?:.*-)?[a-z_]+-([0-9]+)-([0-9]+)-([0-9a-f]+)$`)

// bootFile identifies a boot of the machine.
const bootFile = "/proc/sys/kernel/random/boot_id"

// process is the content of /proc/PID/stat: the command, truncated to 15 bytes, the parent, and the start in
// ticks since the machine's.
type process struct {
	command string
	parent  int
	started string
}

func parseStat(text []byte) (process, bool) {
	open, end := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return process{}, false
	}
	fields := strings.Fields(string(text[end+1:]))
	const parent, started = 1, 19 // fields 4 and 22 of proc(5), counted from the one after the command
	if len(fields) <= started {
		return process{}, false
	}
	n, err := strconv.Atoi(fields[parent])
	return process{command: string(text[open+1 : end]), parent: n, started: fields[started]}, err == nil
}
