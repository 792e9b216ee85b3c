{{/*
Deployment of routers or media processes. Arguments: root; name; values (`router` or `media`); media
(whether they are media processes).
*/}}
{{- define "smart-router.deployment" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $drain := ($values.settings | default dict).MEDIA_DRAIN_TIME | default "5m" -}}
{{- $needed := include "smart-router.seconds" (dict "duration" $drain) | int | add 15 -}}
{{- if lt (int .values.terminationGracePeriodSeconds) (int $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, but MEDIA_DRAIN_TIME (%s) needs %d: Kubernetes would kill the process before its streams end" (ternary "media" "router" .media) (int .values.terminationGracePeriodSeconds) $drain $needed) -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    app: {{ .name }}
spec:
  replicas: {{ .values.replicas }}
  strategy:
    rollingUpdate:
      maxUnavailable: 0
      maxSurge: 1
  selector:
    matchLabels:
      app: {{ .name }}
  template:
    metadata:
      labels:
        {{- with .values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        app: {{ .name }}
      annotations:
        {{- with .values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        # Changed settings restart the pods.
        checksum/settings: {{ include "smart-router.settings" $root | sha256sum }}
    spec:
      {{- if .media }}
      # The routers read the pods from the API server; media processes read them from Redis.
      automountServiceAccountToken: false
      {{- else }}
      serviceAccountName: {{ .name }}
      {{- end }}
      # With service links, a Service called metrics would set the variable METRICS_PORT.
      enableServiceLinks: false
      {{- with $values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      # Above the sum of the preStop pause (5 s), MEDIA_DRAIN_TIME and the time for streams to close
      # (10 s).
      terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
      {{- with $values.priorityClass.name }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with .values.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .values.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: topology.kubernetes.io/zone
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              app: {{ .name }}
          matchLabelKeys: ["pod-template-hash"]
      affinity:
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels:
                    app: {{ .name }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: {{ ternary "smart-router-media" "smart-router" .media }}
          image: {{ include "smart-router.image" $root | quote }}
          {{- with $values.image.pullPolicy }}
          imagePullPolicy: {{ . }}
          {{- end }}
          {{- if .media }}
          args: ["media"]
          {{- end }}
          ports:
            - name: http
              containerPort: 8080
            - name: metrics
              containerPort: 9090
          envFrom:
            - configMapRef:
                name: {{ include "smart-router.name" $root }}
          env:
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            {{- if .media }}
            - name: API_TOKENS_FILE
              value: ""
            {{- else if $values.agents.namespace }}
            - name: NAMESPACE
              value: {{ $values.agents.namespace | quote }}
            {{- else }}
            - name: NAMESPACE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.namespace
            {{- end }}
            # Keys that the Secret may have: a URL with a password, which overrides the setting, and
            # the headers of a trace collector.
            {{- range list "REDIS_URL" "OTEL_EXPORTER_OTLP_HEADERS" }}
            - name: {{ . }}
              valueFrom:
                secretKeyRef:
                  name: {{ $values.secrets.name }}
                  key: {{ . }}
                  optional: true
            {{- end }}
          volumeMounts:
            - name: secrets
              mountPath: /etc/smart-router/secrets
              readOnly: true
            {{- with $values.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          # On the metrics port, which stays open while streams are drained.
          startupProbe:
            httpGet:
              path: /health
              port: metrics
            periodSeconds: 1
            failureThreshold: 30
          livenessProbe:
            httpGet:
              path: /health
              port: metrics
            periodSeconds: 10
            failureThreshold: 3
          readinessProbe:
            httpGet:
              path: /ready
              port: metrics
            periodSeconds: 2
            failureThreshold: 1
          lifecycle:
            preStop:
              # The process keeps serving until every proxy has removed it.
              sleep:
                seconds: 5
          resources:
            {{- toYaml .values.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: ["ALL"]
      volumes:
        {{- $keys := without $values.secrets.keys "API_TOKENS" }}
        - name: secrets
          {{- if and .media (not $keys) }}
          emptyDir: {}
          {{- else }}
          # The processes follow changes of these files; no restart is needed.
          secret:
            secretName: {{ $values.secrets.name }}
            defaultMode: 288 # 0440
            {{- if not $values.secrets.keys }}
            optional: true
            {{- end }}
            {{- if .media }}
            items:
              {{- range $keys }}
              - key: {{ . }}
                path: {{ . }}
              {{- end }}
            {{- end }}
          {{- end }}
        {{- with $values.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}

{{/* Service and disruption budget of a Deployment. Arguments: root; name. */}}
{{- define "smart-router.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    app: {{ .name }}
spec:
  selector:
    app: {{ .name }}
  ports:
    - name: http
      port: 80
      targetPort: http
    - name: metrics
      port: 9090
      targetPort: metrics
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      app: {{ .name }}
{{- end }}
