package cluster

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/redact"
)

// indexedJobSource is a pod of a Kubernetes Job with completionMode Indexed. It has the pod's index, not the
// number of pods.
var indexedJobSource = source{
	name: "Kubernetes Job", key: "kubernetes", known: "JOB_COMPLETION_INDEX in a pod", depth: hosts,
	detect: func(d *Discovery) bool {
		return d.env("JOB_COMPLETION_INDEX") != "" && d.env("KUBERNETES_SERVICE_HOST") != "" && d.env("JOBSET_NAME") == ""
	},
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("JOB_COMPLETION_INDEX"), r.workers()
		r.podStore(j)
	},
}

// podStore sets the store to the pod with index 0, whose name differs from this one's in the index only. If
// the Job has a headless Service, the full name of this pod is in /etc/hosts.
func (r *reading) podStore(j *Job) {
	pod, err := r.d.Hostname()
	if err != nil {
		r.wrong("the pod's name", err)
		return
	}
	r.note("hostname", pod)
	job, ok := strings.CutSuffix(pod, "-"+strconv.Itoa(j.Worker))
	if !ok || job == "" {
		j.NoStore = fmt.Sprintf("the pod's name %s does not end in its index: %s", clip(pod), storeRemedy)
		return
	}
	j.ID = job
	domain := r.d.podDomain(pod)
	if domain == "" {
		j.NoStore = fmt.Sprintf(`the pods have no names in the cluster. Add to the Job
  spec: {template: {spec: {subdomain: %[1]s}}}
and beside it
  apiVersion: v1
  kind: Service
  metadata: {name: %[1]s}
  spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {job-name: %[1]s}}
or take what lockstep render kubernetes prints`, job)
		return
	}
	r.note("/etc/hosts", pod+"."+domain)
	r.address(j, "hostname", job+"-0."+domain)
}

// podDomain finds the domain of the pod in /etc/hosts: "10.0.0.7  train-1.train.default.svc.cluster.local
// train-1". It returns "" if there is none.
func (d *Discovery) podDomain(pod string) string {
	text, err := d.ReadFile("/etc/hosts")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		for i := 1; i < len(fields); i++ {
			if domain, ok := strings.CutPrefix(fields[i], pod+"."); ok && domain != "" {
				return strings.TrimSuffix(domain, ".")
			}
		}
	}
	return ""
}

// jobSetSource is a pod of a JobSet whose manifest passes its variables on, with the names that xpk uses.
// Kubernetes sets JOB_COMPLETION_INDEX automatically; the pods are called
// JOBSET-REPLICATEDJOB-JOBINDEX-INDEX.JOBSET.
var jobSetSource = source{
	name: "JobSet", key: "jobset", known: "JOBSET_NAME and JOB_COMPLETION_INDEX", depth: hosts,
	detect: func(d *Discovery) bool { return d.env("JOBSET_NAME") != "" && d.env("JOB_COMPLETION_INDEX") != "" },
	read: func(r *reading, j *Job) {
		set, replicated := r.text("JOBSET_NAME"), r.text("REPLICATED_JOB_NAME")
		job, index := max(0, r.number("JOB_INDEX")), r.need("JOB_COMPLETION_INDEX")
		j.Worker, j.ID = index, set
		if job > 0 {
			each := r.need("PROCESSES_IN_JOB")
			if each > 0 && index >= each {
				r.fail("JOB_COMPLETION_INDEX=%d, but PROCESSES_IN_JOB=%d", index, each)
			}
			if each > 0 && job < hostsMax/each {
				j.Worker = job*each + index
			} else {
				r.fail("JOB_INDEX=%d: want less than %d jobs", job, hostsMax/max(1, each))
			}
		}
		j.Workers = r.workers()
		if replicated == "" {
			j.NoStore = "REPLICATED_JOB_NAME is not set, so the name of the first pod is unknown: " + storeRemedy
			return
		}
		r.address(j, "JOBSET_NAME", fmt.Sprintf("%s-%s-0-0.%s", set, replicated, set))
	},
}

// lwsSource is a pod of a LeaderWorkerSet. The leader has index 0.
var lwsSource = source{
	name: "LeaderWorkerSet", key: "lws", known: "LWS_LEADER_ADDRESS", depth: allocation,
	detect: func(d *Discovery) bool { return d.env("LWS_LEADER_ADDRESS") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("LWS_WORKER_INDEX"), r.workers("LWS_GROUP_SIZE")
		leader := r.text("LWS_LEADER_ADDRESS")
		r.address(j, "LWS_LEADER_ADDRESS", leader)
		j.ID, _, _ = strings.Cut(leader, ".")
	},
}

// address builds a store's URL from an address with or without a port.
func (r *reading) address(j *Job, name, text string) {
	if strings.Contains(text, "://") {
		r.fail("%s=%s: want HOST or HOST:PORT", name, strconv.Quote(clip(redact.URL(text))))
		return
	}
	store, err := storeURL(text)
	if err != nil {
		r.wrong(name, err)
		return
	}
	j.Store = store
}
